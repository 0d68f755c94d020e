//! Deployment, ReplicaSet, garbage, namespace and service-account controllers, as API clients.
