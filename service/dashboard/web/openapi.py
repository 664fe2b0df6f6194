"""Print the service's OpenAPI document, for `npm run types`. Run with the project's own interpreter."""

import json
import sys

from service.app import create_app
from service.settings import Settings

json.dump(create_app(Settings()).openapi(), sys.stdout, indent=1, sort_keys=True)
