"""The parts of ``metadata`` that kvtier reads. The API server owns the rest."""

from __future__ import annotations

from typing import Any, Final

from pydantic import ConfigDict, Field, field_validator

from kvtier_api.model import ApiModel

GROUP: Final = "kvtier.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "kvtier.io/v1alpha1"


class OwnerReference(ApiModel):
    model_config = ConfigDict(extra="ignore")

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class ObjectMeta(ApiModel):
    """``metadata``: times stay text (RFC 3339, UTC), which sorts as time does."""

    model_config = ConfigDict(extra="ignore")

    name: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    owner_references: tuple[OwnerReference, ...] = ()

    @field_validator("labels", "annotations", mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value
