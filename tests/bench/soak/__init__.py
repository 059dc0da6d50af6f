"""Ten minutes of more load than a worker can take, and whether it is afterwards what it was before.

``load`` plans requests, ``target`` sends them and keeps what came of each, ``watch`` reads the worker's gauges
meanwhile, ``aftermath`` looks at what is left, ``judgement`` says what holds, ``session`` puts them in order.
"""
