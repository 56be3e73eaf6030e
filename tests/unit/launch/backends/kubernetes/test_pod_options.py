"""What `megalite k8s` makes of what is typed: names, quantities, and one sentence for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.backends.kubernetes import pod_options
from launch.errors import LaunchError
from tests.conftest import write_config
from tests.helpers.k8s_command_line import command


@given(st.text(alphabet="abcXYZ019-_. /", max_size=70), st.integers(1, 2000))
def test_names_fit_all_that_is_made_of_them(word: str, nodes: int) -> None:
    """A pod's name, and so its host's, has at most 63 characters and is a DNS label."""
    suggestion = pod_options.suggested_name(word)
    assert not suggestion or pod_options.job_name(suggestion, Path("run"), 2) == suggestion
    try:
        name = pod_options.job_name(word, Path("run"), nodes)
    except LaunchError as error:
        assert "\n" not in str(error)
        return
    pod = f"{name}-node-0-{nodes - 1}-abcde"
    assert len(pod) <= 63 and len(f"{name}-worker-{nodes - 1}") <= 63
    assert name[0].isalpha() and pod == pod.lower() and set(pod) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@given(
    st.decimals(min_value="0.001", max_value=10**6, places=3),
    st.sampled_from(["", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]),
)
def test_quantities_mean_what_kubernetes_takes_them_for(number: Any, suffix: str) -> None:
    from kubernetes.utils.quantity import parse_quantity

    assert pod_options.amount(f"{number}{suffix}", "--memory") == parse_quantity(f"{number}{suffix}")


MISTAKES = [
    (["--nodes", "3"], "makes 4 processes, but this run has 6"),
    (["--output-claim", "Runs"], '"Runs" is no name of a PersistentVolumeClaim'),
    (["--output-claim", "x" * 254], "is no name of a PersistentVolumeClaim"),
    (["--output-claim", "runs:out"], "write CLAIM:/path, with an absolute path"),
    (["--output-claim", "runs:/dev"], "/dev collides with /dev/shm"),
    (["--data-claim", "corpora:/output"], "both seen at /output"),
    (["run_dir=/home/me/runs/x"], "is not on the claim runs, which pods see at /output"),
    (["run_dir=../x"], "leads out of the claim runs"),
    (["checkpoint.resume=false"], "checkpoint.resume is false"),
    (["--name", "My_Job"], 'as in "my-job"'),
    (["--name", "7b"], "beginning with a letter"),
    (["--name", "x" * 60], "use at most 48"),
    (["run_dir=runs/2026"], "give it one with --name"),
    (["--namespace", "Team"], "is no namespace"),
    (["--image", "my image"], "is no image"),
    (["--image", ""], "is no image"),
    (["--cpu", "many"], "is no quantity"),
    (["--cpu", "0"], "must be more than 0"),
    (["--memory", "64GB"], "is no quantity"),
    (["--memory", "1e3Ki"], "is no quantity"),
    (["--memory", "512m"], "write the unit, as in 64Gi"),
    (["--memory", "64"], "write the unit, as in 64Gi"),
    (["--memory", "1Gi", "--shared-memory", "2Gi"], "of which it is a part"),
    (["--env", "PET_NNODES=3"], "is what the launcher of a pod sets"),
    (["--env", "A"], "not of the form key=value"),
    (["--env", "A=1", "--env", "A=2"], "names A twice"),
    (["--env", "WANDB_API_KEY=abc"], "--secret-env WANDB_API_KEY=SECRET:KEY"),
    (["--env", "A-B=1"], "is no name of a variable"),
    (["--secret-env", "A=B:c"], "is no name of a Secret"),
    (["--secret-env", "A=b"], "not of the form NAME=SECRET:KEY"),
    (["--env", "A=1", "--secret-env", "A=b:c"], "is set as a plain variable as well"),
    (["--secret-env", "PYTHONUNBUFFERED=b:c"], "megalite sets this variable itself"),
    (["--node-selector", "gpu"], "not of the form key=value"),
    (["--node-selector", "gpu=a b"], "is no value of a label"),
    (["--node-selector", f"gpu={'x' * 64}"], "is no value of a label"),
    (["--label", "a/b/c=d"], "is no key of a label"),
    (["--rdma", "hca"], "is no resource of a node"),
    (["--rdma", "rdma/hca=0"], "is no resource of a node"),
    (["--service-account", "a_b"], "is no name of a ServiceAccount"),
    (["--context", "here"], "--context belongs to --submit"),
    (["--env", "CONNECTION=AccountName=a;AccountKey=abc=="], "--secret-env CONNECTION=SECRET:KEY"),
    (["--env", "PUSH=ghp_abcabcabcabc"], "--secret-env PUSH=SECRET:KEY"),
    (["--env", "NCCL_IB_PKEY=ghp_abcabcabcabc"], "--secret-env NCCL_IB_PKEY=SECRET:KEY"),
    (["--env", "GITHUB_PAT=abc"], "--secret-env GITHUB_PAT=SECRET:KEY"),
    (["--env", "HTTPS_PROXY=user:abc@proxy:3128"], "--secret-env HTTPS_PROXY=SECRET:KEY"),
    (["--run-as-user", "trainer"], "write UID or UID:GID in numbers"),
    (["--run-as-user", "2147483648"], "the largest number of a user or group is 2147483647"),
    (["--secret-env", "HOME=b:c"], "megalite sets this variable itself"),
    (["--label", "app.kubernetes.io/instance=all"], "give --name instead"),
    (["--label", f"team=hf_{'a1' * 17}"], "--label team holds a Hugging Face token, which users of"),
    (["--data-claim", "corpora:/var/lib"], "/var/lib collides with /var/lib/megalite"),
]


def test_the_name_of_a_known_setting_is_no_secret() -> None:
    """docs/security.md recommends NCCL_IB_PKEY, whose name looks like that of a key."""
    partitions = ["NCCL_IB_PKEY=0x8001", "UCX_IB_PKEY=0x8001"]
    assert list(pod_options.variables(partitions, [])) == ["NCCL_IB_PKEY", "UCX_IB_PKEY"]


@pytest.mark.parametrize(("more", "told"), MISTAKES, ids=[" ".join(more) for more, _ in MISTAKES])
def test_a_mistake_is_told_before_anything_is_written(
    tiny: dict[str, Any], tmp_path: Path, more: list[str], told: str
) -> None:
    file, k8s = tmp_path / "out.yaml", command(write_config(tmp_path / "config.yaml", tiny))
    with pytest.raises(ValueError) as raised:
        k8s(*more, "-o", str(file))
    assert told in str(raised.value) and "\n" not in str(raised.value) and not file.exists()
    assert "abc" not in str(raised.value)  # the secret is not repeated
