"""How likely the tokens of prompts were, for the sequences of a step that ask: each row predicts the next token.

The rows go through the model's head in pieces of a fixed size, so that memory does not grow with the chunk. Knows
batches and their hidden rows; knows nothing of KV memory, transports or how a score is computed.
"""

from itertools import islice

from torch import Tensor

from model_shards.model import ShardedModel
from workers.batch import Batch
from workers.protocol import Logprobs, SequenceId
from workers.sampling.logprobs import columns
from workers.sampling.sampler import Question, Sampler

_PIECE = 64  # rows: 13 MB of float32 logits for a vocabulary of 50,000


class PromptScorer:
    """Uses the model and the sampler of one rank; a step's calls are collectives, alike on every rank."""

    def __init__(self, model: ShardedModel, sampler: Sampler) -> None:
        self._model = model
        self._sampler = sampler

    def score(
        self,
        hidden: Tensor,  # [tokens, hidden]
        batch: Batch,
    ) -> dict[SequenceId, Logprobs]:
        """On rank 0, by sequence, the log-probabilities of the prompt tokens after those computed in this step."""
        rows: list[int] = []
        questions: list[Question] = []
        runs: list[tuple[SequenceId, int, int]] = []  # sequence, position of the first token asked about, how many
        for entry, query in zip(batch.scheduled, batch.attention.queries, strict=True):
            sequence = entry.sequence
            num_top = sequence.sampling.prompt_logprobs
            count = min(entry.end, sequence.num_prompt_tokens - 1) - entry.start
            if num_top is None or count <= 0:
                continue
            runs.append((sequence.sequence_id, entry.start + 1, count))
            rows.extend(range(query.first, query.first + count))
            asked = sequence.token_ids[entry.start + 1 : entry.start + 1 + count]
            questions.extend(Question(token_id, num_top) for token_id in asked)
        scores = []
        for first in range(0, len(rows), _PIECE):
            logits = self._model.local_logits(hidden[rows[first : first + _PIECE]])
            scores += self._sampler.score(logits, questions[first : first + _PIECE])
        if not scores:
            return {}
        remaining = iter(scores)
        return {sequence_id: columns(start, list(islice(remaining, count))) for sequence_id, start, count in runs}
