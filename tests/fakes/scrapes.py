"""One scrape of /metrics, read as Prometheus reads it, and what must hold of every one."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


@dataclass(frozen=True)
class Scraped:
    samples: list[Sample]

    @classmethod
    def of(cls, text: str) -> "Scraped":
        return cls([sample for family in text_string_to_metric_families(text) for sample in family.samples])

    def __contains__(self, name: str) -> bool:
        return any(sample.name == name for sample in self.samples)

    def __getitem__(self, name: str) -> float:
        """Over all labels."""
        assert name in self, f"the scrape has no {name}"
        return sum(sample.value for sample in self.samples if sample.name == name)

    def by_label(self, name: str, label: str, **among: str) -> dict[str, float]:
        """Over all other labels, of the samples with the labels `among`."""
        values: dict[str, float] = {}
        for sample in self.samples:
            if sample.name == name and among.items() <= sample.labels.items():
                values[sample.labels[label]] = values.get(sample.labels[label], 0) + sample.value
        return values

    @property
    def received(self) -> float:
        return self["shardserve_requests_received_total"]

    @property
    def finished(self) -> dict[str, float]:
        return self.by_label("shardserve_requests_finished_total", "reason")

    def check_conservation(self) -> None:
        """Every request that a driver has received is in exactly one place."""
        running, waiting, received = (
            self.by_label(f"shardserve_requests_{name}", "driver")
            for name in ("running", "waiting", "received_total")
        )
        for driver, count in received.items():
            finished = self.by_label("shardserve_requests_finished_total", "reason", driver=driver)
            assert set(finished) == {"stop", "length", "abort", "error"}
            assert count == running[driver] + waiting[driver] + sum(finished.values()), (
                f"{driver}: {count} received, {running[driver]} running, {waiting[driver]} waiting, {finished=}"
            )

    def check_follows(self, earlier: "Scraped") -> None:
        """No counter has gone down."""
        before = {(s.name, *sorted(s.labels.items())): s.value for s in earlier.samples}
        for sample in self.samples:
            if sample.name.endswith(("_total", "_count", "_bucket", "_sum")):
                key = (sample.name, *sorted(sample.labels.items()))
                assert sample.value >= before.get(key, 0), f"{key} went from {before[key]} to {sample.value}"
