"""Which ends of a run start it again, in the words of Jobs and JobSets.

A pod ends with the exit code of its run (launch/errors.py), because `megalite supervise` is what runs in it: torchrun
alone makes 1 of every code. A failed pod fails its Job, because no rank can go on without the others, and the
JobSet's policy decides by the Job's message, which names the code, as JobSet 0.10 (Kubeflow Trainer 2.1) and later can:
2 and 3 end the run for good; 75, or a pod that was evicted or lost its node, starts it again and does not count;
everything else starts it again, at most `restarts` times.
"""

from __future__ import annotations

from typing import Any

from launch.errors import PREEMPTED_CODE, STOPPED_CODE, USER_ERROR_CODE

FINAL_CODES = [USER_ERROR_CODE, STOPPED_CODE]  # rising, as Kubernetes wants them


def pod_failure_policy(container: str) -> dict[str, Any]:
    """Of a Job: which failed pods give it a reason that names them."""

    def on_exit_codes(*codes: int) -> dict[str, Any]:
        condition = {"containerName": container, "operator": "In", "values": list(codes)}
        return {"action": "FailJob", "onExitCodes": condition}

    evicted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"rules": [on_exit_codes(*FINAL_CODES), on_exit_codes(PREEMPTED_CODE), evicted]}


def job_set_failure_policy(restarts: int) -> dict[str, Any]:
    """Of a JobSet over such Jobs. The first rule that matches counts; without one, it is restarted and counts."""
    codes = "|".join(map(str, FINAL_CODES))
    return {
        "maxRestarts": restarts,
        "rules": [
            {
                "name": "mistakeOrGuard",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [f"exit code ({codes}) matching"],
            },
            {
                "name": "askedToEndOrEvicted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ],
    }
