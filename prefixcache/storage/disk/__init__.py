"""L2: blocks on the local disk, in one LMDB file; needs the extra ``disk``.

tier.py      the Tier on the loop: deadlines, counters, priorities
lane.py      its one thread, and the gate before callers' buffers
store.py     what each call does in LMDB transactions
room.py      what goes when there is no room
tables.py    the file's tables;  records.py  their keys and values
folder.py    who may use the folder, and what becomes of a damaged file
"""

from prefixcache.storage.disk.tier import DiskOptions, DiskTier

__all__ = ["DiskOptions", "DiskTier"]
