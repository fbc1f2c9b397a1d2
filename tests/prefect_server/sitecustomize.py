"""On the path of test servers: mends a deadlock of Prefect 3.7.7 on SQLite.

After the commit of an automation, `update_cache_after_commit` blocks the server's event loop until another loop has taken the lock of all
automations. If a coroutine of the blocked loop holds it (`reconcile_automations`, every few seconds), the server never answers again. Here
the cache is updated by a task of the same loop. On PostgreSQL Prefect does not block.
"""

import asyncio
import importlib.abc
import importlib.util
import sys

tasks = set()


def run_later(coroutine):
    task = asyncio.get_running_loop().create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


class Mend(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "prefect.server.events.models.automations":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.run_coro_as_sync = run_later

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Mend())
