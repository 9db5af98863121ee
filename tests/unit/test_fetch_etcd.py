"""The machine's own package sources are read as apt reads them, mirrors and keys included."""

from __future__ import annotations

import pytest

from scripts.fetch_etcd import (
    PackageSource,
    choose_sources,
    os_release,
    package_sources,
    parse_deb822,
    parse_one_line,
)

MIRROR = "http://mirror.example/debian"


def test_deb822():
    text = f"""\
Types: deb deb-src
# a comment between fields
URIs: {MIRROR}
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/some.gpg

Types: deb-src
URIs: {MIRROR}
Suites: bookworm
Components: main

Types: deb
Enabled: no
URIs: {MIRROR}
Suites: bookworm
Components: main
"""
    assert list(parse_deb822(text)) == [
        PackageSource(
            uris=MIRROR,
            suites=("bookworm", "bookworm-updates"),
            components=("main", "contrib"),
            options=(("Signed-By", "/usr/share/keyrings/some.gpg"),),
        )
    ]


def test_a_key_inside_the_entry_is_kept_whole():
    key = "Signed-By:\n -----BEGIN KEY-----\n .\n mDME\n -----END KEY-----"
    (source,) = parse_deb822(f"Types: deb\nURIs: {MIRROR}\nSuites: trixie\nComponents: main\n{key}")
    assert key in source.stanza().replace("Signed-By: \n", "Signed-By:\n")


@pytest.mark.parametrize(
    ("line", "options"),
    [
        (f"deb {MIRROR} bookworm main contrib", ()),
        (f"deb [signed-by=/k.gpg] {MIRROR} bookworm main contrib", (("Signed-By", "/k.gpg"),)),
        (
            f"deb [ arch=amd64 signed-by=/k.gpg trusted=yes ] {MIRROR} bookworm main contrib",
            (("Signed-By", "/k.gpg"), ("Trusted", "yes")),
        ),
        (f"deb {MIRROR} bookworm main contrib # the mirror", ()),
    ],
)
def test_one_line(line, options):
    expected = PackageSource(
        uris=MIRROR, suites=("bookworm",), components=("main", "contrib"), options=options
    )
    assert list(parse_one_line(f"# head\n\ndeb-src {MIRROR} x main\n{line}\n")) == [expected]


def test_all_files_of_the_machine_are_read_in_order(tmp_path):
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (tmp_path / "sources.list").write_text("deb http://one bookworm main\n")
    (parts / "b.sources").write_text(
        "Types: deb\nURIs: http://three\nSuites: s\nComponents: main\n"
    )
    (parts / "a.list").write_text("deb http://two s main\n")
    (parts / "c.sources.disabled").write_text("Types: deb\nURIs: http://four\n")
    found = [source.uris for source in package_sources(tmp_path)]
    assert found == ["http://one", "http://two", "http://three"]


def test_no_sources_at_all(tmp_path):
    assert list(package_sources(tmp_path)) == []


def source(uris, *suites, components=("main",)):
    return PackageSource(uris=uris, suites=suites, components=components)


@pytest.mark.parametrize(
    ("distribution", "codename", "expected"),
    [
        ("debian", "bookworm", [("http://own", "trixie"), ("http://own", "bookworm")]),
        ("debian", "trixie", [("http://next", "trixie")]),
        ("ubuntu", "noble", [("http://ubuntu", "noble")]),
        ("fedora", "", []),
    ],
)
def test_the_release_of_the_machine_decides(distribution, codename, expected):
    sources = [
        source("http://vendor", "stable"),
        source("http://security", "bookworm-security"),
        source("http://own", "bookworm", "bookworm-updates"),
        source("http://next", "trixie"),
        source("http://ubuntu", "noble", components=("main", "universe")),
    ]
    chosen = choose_sources(sources, distribution=distribution, codename=codename)
    assert [(s.uris, *s.suites) for s in chosen] == expected


def test_os_release(tmp_path):
    path = tmp_path / "os-release"
    path.write_text('ID=debian\nVERSION_CODENAME="trixie"\n\n')
    assert os_release(path) == {"ID": "debian", "VERSION_CODENAME": "trixie"}
    assert os_release(tmp_path / "absent") == {}
