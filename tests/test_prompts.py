from tests import prompts


def test_there_are_48_prompts_of_many_sources_and_no_two_alike() -> None:
    found = prompts.prompts()
    assert len(found) == 48
    assert len({prompt.id for prompt in found}) == 48
    assert len({prompt.text for prompt in found}) == 48
    assert len({prompt.source for prompt in found}) >= 8


def test_there_are_12_dialogues_of_two_turns() -> None:
    assert len(prompts.chats()) == 12
    assert all(all(chat.turns) for chat in prompts.chats())


def test_the_system_prompt_has_eight_questions() -> None:
    assert prompts.system_prompt().startswith("# IDENTITY")
    assert len(set(prompts.questions())) == 8


def test_every_source_has_its_licence_in_the_readme() -> None:
    rows = (prompts.DATA / "README.md").read_text(encoding="utf-8")
    assert all(f"| {prompt.source} |" in rows for prompt in prompts.prompts())


def test_the_data_stays_small() -> None:
    assert sum(path.stat().st_size for path in prompts.DATA.rglob("*")) < 400_000
