"""An operator on kopf, as published: it copies the size of each Bucket into its status, with a finalizer."""
import kopf


@kopf.on.startup()
def configure(settings: kopf.OperatorSettings, **_):
    settings.persistence.finalizer = "clients.example.com/kopf"
    settings.posting.enabled = False


@kopf.on.create("clients.example.com", "v1", "buckets")
@kopf.on.update("clients.example.com", "v1", "buckets")
def copy(spec, patch, **_):
    patch.status["kopf"] = spec["size"]


@kopf.on.delete("clients.example.com", "v1", "buckets")
def forget(**_):
    pass
