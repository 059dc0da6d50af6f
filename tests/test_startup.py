from model_worker.startup import Startup


def test_each_part_is_the_time_since_the_one_before() -> None:
    times = iter([10.0, 11.5, 11.75])
    startup = Startup(clock=lambda: next(times))
    startup.note("load")
    startup.note("canary")
    assert startup.seconds == {"load": 1.5, "canary": 0.25}
    assert startup.text() == "load 1.50 s, canary 0.25 s"
