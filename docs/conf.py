# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx. `make docs` builds the pages, with warnings as errors."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # the package of this checkout, whatever is installed

import bytecheckpoint  # noqa: E402

project = "bytecheckpoint"
author = "the bytecheckpoint maintainers"
project_copyright = author
release = version = bytecheckpoint.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["extensions"]
default_role = "literal"

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# PyTorch's own theme, pytorch_sphinx_theme2, is made of this one. It puts the trackers of PyTorch's site (a tag manager
# and a pixel) and its search into every page, whatever its options say.
html_theme = "pydata_sphinx_theme"
html_theme_options = {"show_prev_next": False, "secondary_sidebar_items": ["page-toc"]}
html_title = f"bytecheckpoint {version}"
html_show_sourcelink = False
