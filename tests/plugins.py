"""Packages of a user's own that add parts to ours, installed as pip would install them."""

import sys


def write_package(site, entry_points, **modules):
    """Write a package with these entry points and modules (name = text) to a folder of installed packages."""
    facts = site / "mine-1.0.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(entry_points)
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text, encoding="utf-8")


def install(monkeypatch, registry, site, entry_points, **modules):
    """Make this process see a new package until the end of the test; `registry` looks for packages again."""
    write_package(site, entry_points, **modules)
    monkeypatch.syspath_prepend(site)
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(registry, "_loaded", False)
    monkeypatch.setattr(registry, "registered", dict(registry.registered))
