"""`python -m omnicomp.audit.schema`: write the JSON Schema anew after a change of the model."""

import json
from pathlib import Path

from omnicomp.audit.schema import FILE, generate

Path(__file__).with_name(FILE).write_text(json.dumps(generate(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
