"""The scaler's settings: environment (ESPALIER_...) and flags."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import CliImplicitFlag

from request_manager.scaler.policy import Limits
from request_manager.scaler.signals import Aims
from treecore.service.settings import ServiceSettings

Endpoint = Annotated[str, Field(pattern=r"^\S+:\d{1,5}$", description="host:port")]
Count = Annotated[int, Field(ge=1)]


class ReplicaBounds(BaseModel):
    """What holds for whatever is scaled; a verifier group counts as one replica."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: Count = 1
    max_replicas: Count
    requests_per_replica: Count = Field(16, description="as many run on one at once (a manager's max_batch)")
    step_up: Count = 1
    step_down: Count = 1

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas exceeds max_replicas")
        return self


class VerifierTarget(ReplicaBounds):
    """The verifier groups: a StatefulSet whose pods 0 .. pods_per_group - 1 are the first group, and so on."""

    stateful_set: str
    pods_per_group: Count = 1


class SsmTarget(ReplicaBounds):
    """An SSM's Deployment. Its workers' time limits it, long before the requests whose drafts they can hold do."""

    requests_per_replica: Count = 64
    name: str = Field(description="the SSM's name, as its workers announce it")
    deployment: str
    endpoint: Endpoint = Field(description="operations ports of its workers")


class ScalerSettings(ServiceSettings):
    """Flags of `python -m request_manager.scaler`. It does not use the broker."""

    namespace: str = Field(description="where the targets and the lease are")
    lease: str = Field("espalier-scaler", description="the lease that decides who acts")
    kubernetes_url: str | None = Field(None, description="the API, as of kubectl proxy; none: the cluster's own")
    load_endpoints: tuple[Endpoint, ...] = Field(min_length=1, description="operations ports of gateways and managers")
    verifier: VerifierTarget | None = None
    ssms: tuple[SsmTarget, ...] = ()
    dry_run: CliImplicitFlag[bool] = Field(False, description="only tell what would be done")
    period_s: float = Field(15.0, gt=0, description="from one look at the metrics to the next")
    scrape_timeout_s: float = Field(5.0, gt=0)
    queue_target_s: float = Field(0.5, gt=0, description="queue time that the quantile should not exceed")
    ttft_target_s: float = Field(2.0, gt=0, description="TTFT that the quantile should not exceed")
    quantile: float = Field(0.9, gt=0, lt=1)
    utilisation_target: float = Field(0.6, gt=0, le=1, description="share of the time that SSM workers should be busy")
    band: float = Field(0.15, ge=0, lt=1, description="how far demand may be off before anything changes")
    cooldown_up_s: float = Field(60.0, ge=0)
    cooldown_down_s: float = Field(600.0, ge=0)

    @model_validator(mode="after")
    def _scrapes_in_time(self) -> Self:
        if self.scrape_timeout_s > self.period_s:
            raise ValueError("scrape_timeout_s exceeds period_s")
        return self

    @property
    def stale_after_s(self) -> float:
        """How old what was measured may be: one missed scrape, and a little jitter."""
        return 2.5 * self.period_s

    @property
    def aims(self) -> Aims:
        """What is to be held."""
        return Aims(self.queue_target_s, self.ttft_target_s, self.quantile, self.utilisation_target)

    def limits(self, target: ReplicaBounds) -> Limits:
        """What may be done with a target."""
        return Limits(
            **target.model_dump(include=set(ReplicaBounds.model_fields)),
            band=self.band,
            cooldown_up_s=self.cooldown_up_s,
            cooldown_down_s=self.cooldown_down_s,
            stale_after_s=self.stale_after_s,
        )
