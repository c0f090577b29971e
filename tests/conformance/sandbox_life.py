"""Boxes come and go: closing, killing, many at once, and nothing that is left."""

from __future__ import annotations

import asyncio
import os
import secrets

import pytest

from palestra.sandbox.attacks.scene import survivors
from palestra.sandbox.types import PROMISES, Backend, Box, BoxLostError, BoxSpec, SandboxError, SandboxUnavailableError
from tests.conformance.sandbox_leaks import differences, holdings
from tests.conformance.sandbox_runs import until_found


class LifeCases:
    spec: BoxSpec
    many = 32
    connections = 0
    """Most sockets that the backend keeps open for its next call."""

    async def test_it_says_what_it_enforces(self, backend: Backend) -> None:
        enforced = backend.enforced()
        assert set(enforced.weaker()) <= set(PROMISES)
        assert bool(enforced.weaker()) <= bool(enforced.notes)

    async def test_closing_twice_and_using_a_closed_box(self, backend: Backend) -> None:
        box = await backend.create(self.spec)
        assert box.alive
        await asyncio.gather(box.close(), box.close())
        await box.close()
        assert not box.alive
        assert (await box.exec("true")).status == "infra_error"
        with pytest.raises(BoxLostError):
            await box.put("file", b"")

    async def test_closing_ends_what_runs(self, backend: Backend) -> None:
        box = await backend.create(self.spec)
        marker = f"palestra-closed-{secrets.token_hex(8)}"
        run = asyncio.create_task(box.run_python(f"import os; os.execv('/bin/sleep', ['{marker}', '60'])", timeout=60))
        await until_found(marker)
        await box.close()
        assert survivors(marker) == []
        assert (await run).status == "infra_error"

    async def test_killing_processes_leaves_the_files(self, box: Box) -> None:
        await box.put("file", b"stays")
        marker = f"palestra-cleaned-{secrets.token_hex(8)}"
        run = asyncio.create_task(box.run_python(f"import os; os.execv('/bin/sleep', ['{marker}', '60'])", timeout=60))
        await until_found(marker)
        await box.kill_processes()
        assert survivors(marker) == []
        assert (await run).status == "timeout"
        assert await box.get("file") == b"stays"
        assert (await box.exec("true")).status == "ok"

    async def test_a_spec_that_cannot_be_had_is_refused_and_leaves_nothing(self, backend: Backend) -> None:
        seen = []
        for _ in range(2):  # what is kept for the next one, such as connections, is there after the first
            with pytest.raises(SandboxUnavailableError, match="no_such_module"):
                await backend.create(BoxSpec(preload=("no_such_module",)))
            with pytest.raises(SandboxError):
                await backend.create(BoxSpec(image="no-such-image:0"))
            seen.append(holdings())
        assert differences(*seen, self.connections) == []

    async def test_many_boxes_at_once_and_nothing_is_left_of_them(self, backend: Backend) -> None:
        await (await backend.create(self.spec)).close()
        before = holdings()
        boxes = await asyncio.gather(*[backend.create(self.spec) for _ in range(self.many)])
        try:
            assert len({box.id for box in boxes}) == self.many
            results = await asyncio.gather(*[box.exec(f"echo {number}") for number, box in enumerate(boxes)])
            assert [result.stdout for result in results] == [b"%d\n" % number for number in range(self.many)]
        finally:
            await asyncio.gather(*[box.close() for box in boxes])
        assert differences(before, holdings(), self.connections) == []
        assert await self.leftovers(backend) == []

    async def leftovers(self, backend: Backend) -> list[str]:
        """What else of closed boxes is there, of things that only this backend has."""
        return []

    async def test_the_reaper_leaves_living_boxes_alone(self, backend: Backend, box: Box) -> None:
        await box.put("file", b"here")
        await backend.reap()
        assert await box.get("file") == b"here"
        assert (await box.exec("true")).status == "ok"

    async def test_a_caller_that_goes_away_harms_nobody(self, box: Box) -> None:
        run = asyncio.create_task(box.exec("sleep 0.5; echo late"))
        await asyncio.sleep(0.1)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        result = await box.exec("echo mine", timeout=20)
        assert not box.alive or result.stdout == b"mine\n"


class ConfinedLife:
    spec: BoxSpec

    async def test_two_boxes_cannot_see_each_other(self, backend: Backend) -> None:
        one, two = await asyncio.gather(backend.create(self.spec), backend.create(self.spec))
        try:
            word = secrets.token_hex(8)
            await one.put("secret", word.encode())
            marker = f"palestra-neighbour-{word}"
            run = asyncio.create_task(
                one.run_python(f"import os; os.execv('/bin/sleep', ['{marker}', '60'])", timeout=60)
            )
            pid = await until_found(marker)
            await two.put(f"own-{word}", b"")
            code = (
                "import os, glob\nfor pattern in ('/workspace/*', '/tmp/*', '/tmp/*/*/*/*', '/dev/shm/*', '/proc/*/cwd/*'):\n"
                "    for path in glob.glob(pattern):\n        print(path)\n"
                "        try: print(open(path).read(200))\n        except OSError as error: print(error)\n"
                "for name in glob.glob('/proc/[0-9]*/cmdline'):\n"
                "    try: print(open(name).read())\n    except OSError as error: print(error)\n"
                f"try: os.kill({pid}, 9)\nexcept OSError as error: print(error)\n"
            )
            result = await two.run_python(code)
            assert word.encode() not in result.stdout.replace(b"own-" + word.encode(), b"").replace(
                marker.encode(), b""
            )
            assert marker.encode() not in result.stdout
            assert survivors(marker) == [pid]
            await one.close()
            await run
        finally:
            await asyncio.gather(one.close(), two.close())

    async def test_what_it_writes_is_not_out_here(self, box: Box) -> None:
        name = f"palestra-inside-{secrets.token_hex(8)}"
        await box.exec(f"for folder in /tmp /var/tmp /dev/shm / /usr /etc; do echo x > $folder/{name}; done")
        assert [
            place for place in ("/tmp", "/var/tmp", "/dev/shm", "/", "/usr", "/etc") if name in os.listdir(place)
        ] == []
