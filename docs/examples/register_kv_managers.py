"""A prefix-cache policy: it remembers whole prompts in a dictionary and evicts the oldest first."""

import numpy as np
from llmcore.api import KVManagerSpec, hookimpl

NOTHING = np.empty(0, np.int32)


@hookimpl
def register_kv_managers():
    yield KVManagerSpec(name="last-prompts", make=f"{__name__}:LastPrompts")


class LastPrompts:
    """api.sched.KVManager. It names granules, and core counts their references."""

    caching = True

    def __init__(self, granule=1):
        self.granule = granule
        self.held = {}

    def _keys(self, salt, content):
        """Returns one key per granule. A key covers everything up to the granule's end."""
        ends = range(self.granule, len(content) + 1, self.granule)
        return [(salt, content[:end].tobytes()) for end in ends]

    def match(self, salt, content):
        found = []
        for key in self._keys(salt, content):
            if key not in self.held:
                break
            found.append(self.held[key])
        return np.asarray(found, np.int32)

    def insert(self, salt, content, granules):
        keys = self._keys(salt, content)[: len(granules)]
        new = {key: granule for key, granule in zip(keys, granules.tolist(), strict=True) if key not in self.held}
        self.held.update(new)
        return np.asarray(list(new.values()), np.int32)

    def remove(self, salt, content, start):
        prefix = content[: start // self.granule * self.granule + self.granule].tobytes()
        gone = [key for key in self.held if key[0] == salt and key[1].startswith(prefix)]
        return np.asarray([self.held.pop(key) for key in gone], np.int32)

    def evict(self, n, in_use):
        gone = []
        for key in sorted(self.held, key=lambda key: -len(key[1])):
            if len(gone) == n:
                break
            if not in_use(np.asarray([self.held[key]], np.int32))[0]:
                gone.append(self.held.pop(key))
        return np.asarray(gone, np.int32)

    def stats(self):
        return {"granules": len(self.held), "nodes": len(self.held)}
