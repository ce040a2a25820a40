"""The recipes for `ray up` and KubeRay are files that these programs accept."""

import copy

import jsonschema
import pytest
import yaml

from tests.support.documented import ROOT, blocks_of

RECIPES = {
    "apiVersion" if "apiVersion:" in block.text else "provider": yaml.safe_load(block.text)
    for block in blocks_of(ROOT / "docs/ray-cluster.md")
    if block.language == "yaml" and ("apiVersion:" in block.text or "provider:" in block.text)
}

STRING, COUNT, OBJECT = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}


def known(required, **fields):
    """A mapping with these fields and no others."""
    return {"type": "object", "properties": fields, "additionalProperties": False, "required": required}


CONTAINER = known(["name", "image"], name=STRING, image=STRING, resources=OBJECT, volumeMounts={"type": "array"})
TEMPLATE = known(
    ["spec"], spec=known(["containers"], containers={"type": "array", "items": CONTAINER}, volumes={"type": "array"})
)
START = {"type": "object", "additionalProperties": STRING}
RAY_JOB = known(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=OBJECT,
    spec=known(
        ["entrypoint", "rayClusterSpec"],
        entrypoint=STRING,
        shutdownAfterJobFinishes={"type": "boolean"},
        backoffLimit=COUNT,
        runtimeEnvYAML=STRING,
        rayClusterSpec=known(
            ["headGroupSpec"],
            rayVersion=STRING,
            headGroupSpec=known(["template"], rayStartParams=START, template=TEMPLATE),
            workerGroupSpecs={
                "type": "array",
                "items": known(
                    ["groupName", "template"],
                    groupName=STRING,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=START,
                    template=TEMPLATE,
                ),
            },
        ),
    ),
)
"""The fields that the recipe uses; kuberay ray-operator/apis/ray/v1/rayjob_types.go and raycluster_types.go."""


def test_ray_up_accepts_its_file():
    """Ray's own preparation and schema take the file, and refuse a misspelt key of it."""
    util = pytest.importorskip("ray.autoscaler._private.util")

    util.validate_config(util.prepare_config(copy.deepcopy(RECIPES["provider"])))
    with pytest.raises(jsonschema.ValidationError):
        util.validate_config(util.prepare_config(RECIPES["provider"] | {"setup_comands": []}))


def test_the_ray_job_has_kuberays_fields():
    """Names and types are those of KubeRay; the environment inside is YAML too, and the study's folder is mounted."""
    job = RECIPES["apiVersion"]

    jsonschema.validate(job, RAY_JOB)
    spec = job["spec"]
    assert set(yaml.safe_load(spec["runtimeEnvYAML"])) == {"env_vars"}
    groups = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
        assert spec["entrypoint"].split()[-1].startswith(mounts["studies"])
