"""Hostfiles and their filters, and what `deepspeed` is given for them."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cluster.deepspeed_launcher import (
    EXPORTED,
    check_launcher,
    check_paths,
    launcher_command,
    launcher_environment,
    write_files,
)
from launch.errors import LaunchError
from launch.runtime.forwarded_environment import environment_notices, forwarded_environment, user_environment_files
from launch.runtime.hostfile import Host, hostfile_text, include_filter, read_hostfile, select_hosts
from launch.runtime.import_path import import_variables
from launch.runtime.rank_environment import read_rank
from launch.runtime.started_modules import DEEPSPEED_RUNNER, python_command
from launch.trainer.start.run_config import load_run_config
from tests.conftest import write_config
from tests.helpers.canaries import loaded_from, plant

NODES = (Host("node1", (0, 1)), Host("node2", (0, 1, 2)))


def written(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_hosts_in_their_order_with_comments_and_empty_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "# the cluster\n\nnode2 slots=3  # the large one\n  10.0.0.7\tslots=1\n")
    assert read_hostfile(path) == (Host("node2", (0, 1, 2)), Host("10.0.0.7", (0,)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host: add lines such as `node1 slots=8`"),
        ("# node1 slots=8\n", "names no host"),
        ("node1\n", "hosts:1:6: slots=NUMBER is missing after node1, as in `node1 slots=8`"),
        ("node1 slots=2\nnode2 gpus=2\n", "hosts:2:7: 'gpus=2' is not slots=NUMBER"),
        ("node1 slots=two\n", "hosts:1:7: 'slots=two' is not slots=NUMBER"),
        ("node1 slots=\n", "hosts:1:7: 'slots=' is not slots=NUMBER"),
        ("node1 slots=-1\n", "hosts:1:7: 'slots=-1' is not slots=NUMBER"),
        ("node1  slots=0\n", "hosts:1:14: 0 slots are not 1 to 1024"),
        ("node1 slots=80000\n", "hosts:1:13: 80000 slots are not 1 to 1024"),
        ("node1 slots=2 max_slots=4\n", "hosts:1:15: 'max_slots=4' does not belong here: write `node1 slots=2` alone"),
        ("node1:2\n", "hosts:1:1: 'node1:2' is not a host's name (write `node1 slots=2`)"),
        ("node1 2\n", "hosts:1:7: '2' is not slots=NUMBER, as in `node1 slots=2`"),
        ("node1 cpu=4\n", "'cpu=4' is not slots=NUMBER, as in `node1 slots=4`"),
        ("a slots=1\n b slots=1\na slots=2\n", "hosts:3:1: host a is already in line 1"),
        ("root@node1 slots=1\n", "hosts:1:1: 'root@node1' is not a host's name (a user name belongs in ~/.ssh/config)"),
        ("-oProxyCommand=x slots=1\n", "hosts:1:1: '-oProxyCommand=x' is not a host's name"),
        *(
            (f"{text}\n", f"hosts:1:1: {text.split()[0]!r} is not a host's name (write one host a line by its name or")
            for text in ("node1,node2", "node[1-2] slots=8", "[gpu]", "::1 slots=2")
        ),
        ("node1;reboot slots=1\n", "hosts:1:1: 'node1;reboot' is not a host's name"),
    ],
)
def test_a_mistake_is_told_with_line_and_column(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(LaunchError) as error:
        read_hostfile(written(tmp_path, text))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_hostfile_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="does not exist: name one with lines such as"):
        read_hostfile(tmp_path / "nothing")
    with pytest.raises(LaunchError, match="takes a file, not hosts: write `a slots=2` and `b slots=4` into one"):
        read_hostfile(Path("a:2,b:4"))
    with pytest.raises(LaunchError, match="cannot be read: Is a directory"):
        read_hostfile(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LaunchError, match="cannot be read: it is not text"):
        read_hostfile(tmp_path / "binary")


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        (None, None, NODES),
        ("node2", None, (NODES[1],)),
        ("node2:2,0@node1", None, (NODES[0], Host("node2", (0, 2)))),
        (None, "node1", (NODES[1],)),
        (None, "node1:1@node2:0", (Host("node1", (0,)), Host("node2", (1, 2)))),
    ],
)
def test_filters(include: str | None, exclude: str | None, left: tuple[Host, ...]) -> None:
    assert select_hosts(NODES, include, exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("node1", "node2", "cannot be given together"),
        ("node3", None, "host 'node3' is not in the hostfile, which has node1, node2"),
        ("node1:2", None, "host node1 has slots 0 to 1, not '2'"),
        ("node1:", None, "host node1 has slots 0 to 1, not ''"),
        ("node1:0@node1:1", None, "host node1 is named twice: put its slots together (node1:0,1)"),
        (None, "node1@node2", "leaves no host"),
        ("", None, "host '' is not in the hostfile"),
    ],
)
def test_a_filter_that_makes_no_sense(include: str | None, exclude: str | None, said: str) -> None:
    with pytest.raises(LaunchError) as error:
        select_hosts(NODES, include, exclude)
    assert said in str(error.value)


@given(st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=5))
def test_what_deepspeed_is_given_leads_back_to_the_same_hosts(chosen: list[set[int]]) -> None:
    hosts = tuple(Host(f"node{number}", tuple(sorted(devices))) for number, devices in enumerate(chosen))
    names = [line.split()[0] for line in hostfile_text(hosts).splitlines()]
    full = [
        Host(name, tuple(range(int(line.partition("=")[2]))))
        for name, line in zip(names, hostfile_text(hosts).splitlines(), strict=True)
    ]
    assert select_hosts(full, include_filter(hosts), None) == hosts


def test_deepspeed_itself_reads_them_so(tmp_path: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own runner makes of our words the command for pdsh: hosts in our order, their devices, our variables; of the
    shell's variables none that we did not name, and of the current folder, where it runs, no code here or there.
    """
    hosts = (Host("node2", (0, 2)), Host("node1", (0, 1)))
    shown = {"WORDS": "a=b:c", "MEGALITE_ATTEMPT": "123", "UCX_TLS": "tcp", "PYTHONPATH": "/own", "PYTHONSAFEPATH": "1"}
    for name in (*shown, *(f"{prefix}_API" for prefix in EXPORTED)):
        monkeypatch.setenv(name, "$(touch canary)")
    folder = tmp_path / "attempt"
    write_files(folder, hosts, shown, load_run_config(write_config(tmp_path / "c.yaml", tiny), []))
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600} and len(list(folder.iterdir())) == 4
    assert folder.stat().st_mode & 0o777 == 0o700
    command = launcher_command("pdsh", hosts, ("10.1.2.3", 4567), folder)
    (tmp_path / "bin").mkdir()
    pdsh = tmp_path / "bin" / "pdsh"
    pdsh.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    pdsh.chmod(0o755)
    path = f"{pdsh.parent}:{os.environ['PATH']}"
    variables = launcher_environment(folder, 20, shown) | {"PATH": path, "DS_ACCELERATOR": "cpu"}
    download = plant(tmp_path / "download")
    (download / ".deepspeed_env").write_text("LD_PRELOAD=canary\n")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, cwd=download)
    words = done.stdout.splitlines()
    assert loaded_from(download) == [] and "canary" not in done.stdout
    assert words[words.index("-w") + 1] == "node2,node1"
    (exports,) = (word for word in words if word.startswith("export"))
    assert sorted(exports.split("; ")) == ["", *sorted(f"export {name}={value}" for name, value in shown.items())]
    (world,) = (word.partition("=")[2] for word in words if word.startswith("--world_info="))
    assert json.loads(base64.urlsafe_b64decode(world)) == {"node2": [0, 2], "node1": [0, 1]}
    assert {"--master_addr=10.1.2.3", "--master_port=4567", "--no_local_rank", str(folder / "config.yaml")} <= set(
        words
    )


def test_what_ranks_need_travels_and_secrets_do_so_in_private(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text('# ours\n\nNCCL_DEBUG=INFO\nMY_VARIABLE=1\nGREETING="hello you"\n')
    variables = {
        "NCCL_DEBUG": "WARN",
        "NCCL_API_CANARY": "word",
        "TORCH_CPP_LOG_LEVEL": "eyJhbGciOiJIUzI1",
        "PYTHONHASHSEED": "1",
        "PYTHONPATH": "/own",
        "MV2_CANARY": "word",
        "GLOO_SOCKET_IFNAME": "eth0",
        "WANDB_API_KEY": "123",
        "WANDB_PROJECT": "p",
        "AWS_SECRET_ACCESS_KEY": "k",
        "HF_TOKEN": "t",
        "CUDA_VISIBLE_DEVICES": "0",
        "MEGALITE_TREES": ":1",
        "HOME": "/root",
        "NO_PROXY": "a,b",
        "HTTPS_PROXY": "http://me:word@proxy:3128",
        "MLFLOW_TRACKING_PASSWORD": "word",
        "AZURE_STORAGE_SAS": "sig",
    }
    files = [tmp_path / ".deepspeed_env", tmp_path / "nothing"]
    shown, private = forwarded_environment(variables, files, also=EXPORTED)
    assert shown == {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONHASHSEED": "1"}
    assert private == {
        "NCCL_API_CANARY": "word",
        "TORCH_CPP_LOG_LEVEL": "eyJhbGciOiJIUzI1",
        "MV2_CANARY": "word",
        "WANDB_PROJECT": "p",
        "MY_VARIABLE": "1",
        "WANDB_API_KEY": "123",
        "AWS_SECRET_ACCESS_KEY": "k",
        "HF_TOKEN": "t",
        "NO_PROXY": "a,b",
        "GREETING": "hello you",
        "HTTPS_PROXY": "http://me:word@proxy:3128",
        "MLFLOW_TRACKING_PASSWORD": "word",
        "AZURE_STORAGE_SAS": "sig",
    }
    (tmp_path / ".deepspeed_env").write_text("PATH=/opt:$PATH\n")
    with pytest.raises(
        LaunchError, match=r"deepspeed_env:1: PATH has \$PATH, which is not replaced here: write its value"
    ):
        forwarded_environment({}, [tmp_path / ".deepspeed_env"])
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG\n")
    with pytest.raises(LaunchError, match=r"\.deepspeed_env:1: 'NCCL_DEBUG' is not NAME=VALUE"):
        forwarded_environment({}, [tmp_path / ".deepspeed_env"])


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("export KEY=word", "word"),
        ("export\tKEY='two words'", "two words"),
        ("KEY='a$HOME'", "a$HOME"),
        ("KEY=pa$$word$", "pa$$word$"),
        ("KEY=a$no_variable_of_this_name", "a$no_variable_of_this_name"),
        (r"KEY=a\$HOME", "a$HOME"),
        (r'export KEY="a\${HOME}"', "a${HOME}"),
        ("KEY=a=b", "a=b"),
        ("KEY=a$HOME", None),
        ('KEY="${HOME}"', None),
        ("KEY=$(hostname)", None),
        ("export KEY", None),
        ("exportKEY=a b", "not KEY"),
    ],
)
def test_lines_of_an_environment_file_are_those_of_a_shell(line: str, value: str | None, tmp_path: Path) -> None:
    """A password with a $ was refused, with a remedy that was none; what a shell would replace is still told."""
    (tmp_path / "env").write_text(f"{line}\n")
    if value is None:
        with pytest.raises(LaunchError, match=r"single quotes if that is the value$|is not NAME=VALUE"):
            forwarded_environment({}, [tmp_path / "env"])
    else:
        _, private = forwarded_environment({}, [tmp_path / "env"])
        assert private == ({"exportKEY": "a b"} if value == "not KEY" else {"KEY": value})


def test_an_environment_file_of_the_current_folder_is_read_only_if_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may set LD_PRELOAD for ranks."""
    monkeypatch.chdir(tmp_path)
    at_home = Path.home() / ".deepspeed_env"
    assert user_environment_files({}) == [at_home] and environment_notices([at_home], {}) == []
    (tmp_path / ".deepspeed_env").touch()
    (said,) = environment_notices([at_home], {})
    assert "./.deepspeed_env is not read" in said and f"export DS_ENV_FILE={tmp_path}/.deepspeed_env" in said
    for name in (".deepspeed_env", str(tmp_path / ".deepspeed_env")):
        named = user_environment_files({"DS_ENV_FILE": name})
        assert tmp_path / ".deepspeed_env" in named and environment_notices(named, {}) == []
    assert user_environment_files({"DS_ENV_FILE": "mine"}) == [Path.home() / "mine", tmp_path / "mine"]
    (late,) = environment_notices(named, {"PYTHONWARNINGS": "a,b", "WANDB_API_KEY": "x"})
    assert "ranks have PYTHONWARNINGS only after they have started" in late


def test_a_file_does_not_override_the_launcher_nor_bring_the_current_folder(tmp_path: Path) -> None:
    """Private variables are set in a rank after the launcher's own, and the last one counts."""
    given = {
        "MASTER_ADDR": "10.1.1.1",
        "MASTER_PORT": "29500",
        "RANK": "0",
        "CROSS_SIZE": "9",
        "MEGALITE_ATTEMPT": "other",
        "CUDA_VISIBLE_DEVICES": "0",
        "PYTHONSAFEPATH": "",
    }
    path = tmp_path / ".deepspeed_env"
    path.write_text("".join(f"{name}={value}\n" for name, value in given.items()) + "PYTHONPATH=.:/opt/x:src\nMINE=1\n")
    shown, private = forwarded_environment({}, [path])
    assert shown == {"PYTHONPATH": import_variables({"PYTHONPATH": "/opt/x"})["PYTHONPATH"]}
    assert private == {"MINE": "1"}
    launched = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "CROSS_SIZE": "2"}
    launched |= {"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "41000"}
    assert read_rank(launched | private) == read_rank(launched)
    names = ", ".join(sorted(given))
    dropped, relative = environment_notices([path], private)
    assert dropped == f"{path}: the launcher itself sets {names}, so the file's values are left out"
    assert relative.startswith(f"{path}: of PYTHONPATH only full paths are taken")
    path.write_text("PYTHONPATH=/opt/x\n")
    assert environment_notices([path], {}) == []


def test_what_deepspeed_shows_by_itself_is_known() -> None:
    """Variables with other beginnings would stand on its command lines, whatever they hold."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.launcher.runner import EXPORT_ENVS

    by_accelerators = [kind.export_envs(None) for kind in (CPU_Accelerator, CUDA_Accelerator)]
    assert set(EXPORTED) == set(EXPORT_ENVS).union(*by_accelerators)


def test_tokens_with_any_name_are_private() -> None:
    names = (
        "HF_TOKEN1 HF_TOKENS WANDB_APIKEY2 AZURE_CONN WANDB_IDENTITY HF_PAT MEGALITE_COOKIE AWS_SESSION S3_PASSPHRASE "
        "WANDB_LICENSE HUGGINGFACE_BEARER HF_TOKEN_V2 AWS_CONTAINER_AUTHORIZATION HF_JWT HF_ACCESSTOKEN HF_SIGNED_URL "
        "AWS_MYAPIKEYVALUE GCS_SERVICE_ACCOUNT_JSON HTTPS_PROXY ALL_PROXY AZURE_STORAGE_SAS WANDB_API_KEY AZURE_X S3_X "
        "GOOGLE_APPLICATION_CREDENTIALS UCX_API MLFLOW_TRACKING_TOKEN PYTHON_Y MV2_X NCCL_X CUDA_X TORCH_X DS_X GLOO_X"
    )
    variables = dict.fromkeys(names.split(), "plain")
    assert forwarded_environment(variables, [], also=EXPORTED) == ({}, variables)


def test_a_path_that_shells_would_execute_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/own")
    check_paths(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/own/$(touch canary)")
    with pytest.raises(LaunchError, match=r"PYTHONPATH, .*/own/\$\(touch canary\), has characters that shells"):
        check_paths(tmp_path)


def test_launchers_that_cannot_do_it_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in ("pdsh", "ompi_info", "mpirun", "srun"):
        (tmp_path / program).write_text("#!/bin/sh\necho $MPI\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    part, alike, different = [Host("a", (1,))], [Host("a", (0,)), Host("b", (0,))], list(NODES)
    check_launcher("pdsh", part)
    monkeypatch.setenv("MPI", "HYDRA build details")
    check_launcher("mpich", alike)
    with pytest.raises(LaunchError, match="--launcher mpich cannot be told an --ssh-port"):
        check_launcher("mpich", alike, 2222)
    with pytest.raises(LaunchError, match="equally many slots"):
        check_launcher("mpich", different)
    with pytest.raises(LaunchError, match=r"--launcher openmpi needs its own mpirun, but .*/mpirun is another's"):
        check_launcher("openmpi", different)
    monkeypatch.setenv("MPI", "mpirun (Open MPI) 4.1.4")
    check_launcher("openmpi", different)
    with pytest.raises(LaunchError, match="--launcher mpich needs its own mpirun"):
        check_launcher("mpich", alike)
    with pytest.raises(LaunchError, match="starts the first slots of a host"):
        check_launcher("openmpi", part)
    with pytest.raises(LaunchError, match="inside an allocation"):
        check_launcher("slurm", alike)
    (tmp_path / "pdsh").unlink()
    with pytest.raises(LaunchError, match="--launcher pdsh needs pdsh, which is not on PATH"):
        check_launcher("pdsh", alike)


def test_commands_of_the_other_launchers() -> None:
    master, folder = ("a", 1), Path("/f")
    openmpi = launcher_command("openmpi", NODES, master, folder, ssh_port=2222, launcher_args="--verbose")
    assert "--include" not in openmpi and openmpi[:5] == python_command(DEEPSPEED_RUNNER)
    (given,) = (word.partition("=")[2] for word in openmpi if word.startswith("--launcher_args="))
    assert shlex.split(given)[-4:] == ["--mca", "plm_rsh_args", "-p 2222", "--verbose"]
    slurm = launcher_command("slurm", [Host("a", (0, 1)), Host("b", (0, 1))], master, folder)
    assert "--launcher_args=--distribution=arbitrary" in slurm
    assert all("--force_multi" in words for words in (openmpi, slurm))
    with pytest.raises(LaunchError, match=r"No closing quotation.*correct its quotes"):
        launcher_command("slurm", NODES, master, folder, launcher_args="'--verbose")


def test_the_example_is_one() -> None:
    hosts = read_hostfile(Path(__file__).parents[4] / "configs" / "hostfile.example")
    assert [host.slots for host in hosts] == [8] * 4


PIECES = st.sampled_from(
    ["node1", "node2", " ", "slots=", "2", "9" * 5000, "#", "=", ":", "@", ",", "\t", "-o", "\x1b[1m", "\u0661"]
)


@given(st.lists(PIECES | st.characters(codec="utf-8"), max_size=12).map("".join), st.text(max_size=20))
def test_any_hostfile_and_any_filter_are_hosts_or_one_sentence(text: str, other: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "hostfile"
        path.write_text(f"{text}\nnode1 slots=2\n{other}\n", encoding="utf-8")
        for work in (
            lambda: read_hostfile(path),
            lambda: select_hosts(NODES, text, None),
            lambda: select_hosts(NODES, None, f"node1:{text}"),
        ):
            try:
                assert all(host.slots > 0 for host in work())
            except LaunchError as error:
                assert str(error)
