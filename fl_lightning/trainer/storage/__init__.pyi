from .checkpoint import RunState as RunState
from .checkpoint import by_key as by_key
from .client_store import ClientStore as ClientStore
from .run_folder import RunFolder as RunFolder
from .run_folder import check_unused as check_unused
from .run_folder import locked as locked
