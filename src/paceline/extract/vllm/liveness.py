"""How vLLM's processes end, and calls into them that end with them.

vLLM fails the step that is under way when its engine process dies, but a call of a method is never
answered then, and its caller would wait for ever.
"""

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import TypeVar

from paceline.errors import EngineError

_LOOK_EVERY_S = 0.5

Answer = TypeVar("Answer")


def exit_words(code: int) -> str:
    """How a process ended; code: as `subprocess` and `multiprocessing` give it, minus the signal
    that ended it."""
    if code != -signal.SIGKILL:
        return f"died with exit code {code}; its own words are above"
    return (
        f"died with exit code {code}: SIGKILL, by the kernel where the machine was out of memory "
        "(`dmesg` tells)"
    )


def call_watched(call: Callable[[], Answer], processes: Sequence[BaseProcess]) -> Answer:
    """The call's answer; what it raises is raised. Without processes to watch it is a plain call.

    Raises EngineError where one of the processes ends before the answer is there.
    """
    if not processes:
        return call()
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    # A call that is never answered must not keep the interpreter from ending.
    Thread(target=work, name="vllm-call", daemon=True).start()
    while not wait([answer], timeout=_LOOK_EVERY_S).done:
        for process in processes:
            if not process.is_alive() and not answer.done():
                raise EngineError(
                    f"vLLM's process {process.name} (pid {process.pid}) "
                    f"{exit_words(process.exitcode)}. Run the same command again to go on."
                )
    return answer.result()
