"""What the fields of the spec are made of: strict, frozen sections, and plain values with their unit and bounds."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._/-]{0,62}[a-z0-9])?$")]
Seconds = Annotated[float, Field(gt=0, le=86_400, json_schema_extra={"unit": "s"})]
Tokens = Annotated[int, Field(ge=1, le=100_000_000, json_schema_extra={"unit": "tokens"})]
Bytes = Annotated[int, Field(ge=1, le=1 << 40, json_schema_extra={"unit": "bytes"})]
Share = Annotated[float, Field(gt=0, lt=1, json_schema_extra={"unit": "share"})]
Percent = Annotated[int, Field(ge=0, le=100, json_schema_extra={"unit": "%"})]


class Part(BaseModel):
    """A section of the spec: unknown fields and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
