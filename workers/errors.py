"""What can go wrong inside a worker group. Knows ranks; knows nothing of requests.

WorkerError (RuntimeError)
 |- GroupBroken       a collective did not complete: a peer is gone, stuck or out of step
 |- ChannelError      the step channel failed
 |   |- ChannelTimeout    nothing arrived by the deadline
 |   `- ChannelInterrupted    a wait was cut short: a process that is watched has ended, or a stop was asked for
 |- ProtocolError     a message of another version, incarnation or order
 `- OutOfMemory       weights or KV blocks do not fit; the message has the arithmetic
"""


class WorkerError(RuntimeError):
    """Base of all errors of the data plane."""


class GroupBroken(WorkerError):
    """A collective did not complete by its deadline; the message names the operation and the missing ranks."""


class ChannelError(WorkerError):
    """The step channel cannot be used."""


class ChannelTimeout(ChannelError):
    """No message by the deadline."""


class ChannelInterrupted(ChannelError):
    """A wait was cut short by a descriptor that the channel watches; the message says what it stands for."""


class ProtocolError(WorkerError):
    """A message that this end must refuse: wrong version, wrong incarnation, unknown sequence, bad order."""


class OutOfMemory(WorkerError):
    """Something does not fit into this rank's memory."""
