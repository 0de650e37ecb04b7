"""The package list; all other metadata is in setup.cfg, whose `packages = find:` cannot add folders beside toolkit/."""

from setuptools import find_packages, setup

BESIDE = {"toolkit.jobs": "jobs", "toolkit.templates": "templates", "toolkit.site_configs": "site_configs"}

setup(packages=[*find_packages(include=["toolkit", "toolkit.*"]), *BESIDE], package_dir=BESIDE)
