# SPDX-License-Identifier: Apache-2.0
"""Reports: what a save or a load did, as this rank saw it, and what ``verify`` found."""

from bytecheckpoint.report.load_report import LoadReport, RankLoadReport
from bytecheckpoint.report.save_report import PlanReport, RankSaveReport, SaveReport
from bytecheckpoint.report.verify_report import Problem, VerifyReport

__all__ = ["LoadReport", "PlanReport", "Problem", "RankLoadReport", "RankSaveReport", "SaveReport", "VerifyReport"]
