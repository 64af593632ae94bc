"""The limits an engine works within. Plain resolved numbers; knows nothing of users' files, ranks or HTTP."""

from dataclasses import dataclass

from cluster.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Raises `InvalidConfig` for limits with which some request could never be served."""

    max_model_len: int  # tokens a sequence may have, prompt and output together
    max_num_seqs: int = 256  # sequences in one step at the most
    max_num_batched_tokens: int = 512  # tokens in one step at the most
    max_waiting_requests: int = 512  # requests not yet started; one more is refused with `Overloaded`
    max_steps_in_flight: int = 2  # 1: plan, run, update in turn; 2: plan the next step while one runs
    step_deadline_s: float = 60.0  # a step that takes longer is a failure
    heartbeat_interval_s: float = 0.5  # an idle engine proves this often that the ranks can run a step
    heartbeat_late_s: float = 0.75  # one that takes longer makes health false
    step_late_s: float = 2.0  # a step that takes longer, and much longer than those before it, does so too
    heartbeat_deadline_s: float = 10.0  # and this long is a failure, even where a step may take longer
    max_recoveries: int = 5  # restarts of lost ranks in `recovery_window_s`; one more and the engine gives up
    recovery_window_s: float = 300.0
    prefix_cache: bool = True  # share the KV blocks of equal beginnings
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_waiting_requests"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs one token a step"
            )
        if self.max_steps_in_flight not in (1, 2):
            raise InvalidConfig(f"max_steps_in_flight must be 1 or 2, not {self.max_steps_in_flight}")
        if self.max_recoveries < 0:
            raise InvalidConfig(f"max_recoveries must be at least 0, not {self.max_recoveries}")
        for name in (
            "step_deadline_s",
            "heartbeat_interval_s",
            "heartbeat_late_s",
            "step_late_s",
            "heartbeat_deadline_s",
            "recovery_window_s",
        ):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{name} must be above 0, not {getattr(self, name)}")
