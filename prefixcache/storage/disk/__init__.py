"""L2: blocks on the local disk, in one LMDB file; needs the extra ``disk``.

tier.py                what a caller sees: deadlines, counters, calls cut into jobs
lane.py                the one thread, and the gate before callers' buffers
store.py writer.py     what the jobs do in transactions;  uses.py  when blocks were last used
room.py                what goes when there is no room
file.py folder.py      the file as it lives, who may use its folder, what becomes of damage
tables.py records.py   the file's tables, their keys and values
"""

from prefixcache.storage.disk.tier import DiskOptions, DiskTier

__all__ = ["DiskOptions", "DiskTier"]
