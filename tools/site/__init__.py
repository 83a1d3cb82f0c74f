"""The documentation as a site: python -m tools.site, or make docs.

    docs/, ARCHITECTURE.md, deploy/k8s/README.md, ...  ──┐
    the code ──reference pages──────────────────────────┤
                                                         ▼
                              build/docs (Markdown) ──Zensical──▶ build/site (HTML) ──checks

tree.py gathers the pages in one folder and turns links between files of the repository into links
between pages; a linked file of code gets a page of its own. navigation.py lists the pages. The
modules in `reference` each write a page by walking the code. checks.py reads the HTML: links,
anchors, and requests to other hosts.
"""
