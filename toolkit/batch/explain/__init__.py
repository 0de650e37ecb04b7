"""Why a run is in the state that it is in."""
