//! Names of checkpoint records.

use std::ffi::OsString;

use sha2::{Digest, Sha256};

/// Kind of a record; each has a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    /// A pod of this node.
    Pod,
    /// A config map.
    ConfigMap,
    /// A secret.
    Secret,
    /// The services of one namespace.
    Services,
    /// The names, addresses and ports of the services of one namespace, for cluster DNS.
    ServiceNames,
    /// The EndpointSlices of one namespace.
    Slices,
    /// A service-account token of one pod.
    Token,
    /// The handler of a RuntimeClass.
    RuntimeClass,
}

/// Kind and name of a record.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    kind: Kind,
    name: String,
}

// === impl Kind ===

impl Kind {
    /// All kinds.
    pub(crate) const ALL: [Self; 8] = [
        Self::Pod,
        Self::ConfigMap,
        Self::Secret,
        Self::Services,
        Self::ServiceNames,
        Self::Slices,
        Self::Token,
        Self::RuntimeClass,
    ];

    /// Name of the directory.
    pub(crate) fn directory(self) -> &'static str {
        match self {
            Self::Pod => "pods",
            Self::ConfigMap => "configmaps",
            Self::Secret => "secrets",
            Self::Services => "services",
            Self::ServiceNames => "servicenames",
            Self::Slices => "slices",
            Self::Token => "tokens",
            Self::RuntimeClass => "runtimeclasses",
        }
    }

    /// Whether records of this kind belong to pods and are removed with them.
    pub(crate) fn is_owned(self) -> bool {
        !matches!(self, Self::Pod | Self::ServiceNames)
    }
}

// === impl Key ===

impl Key {
    pub(crate) fn new(kind: Kind, name: impl Into<String>) -> Self {
        Self { kind, name: name.into() }
    }

    /// The record of a pod, by its uid.
    pub(crate) fn pod(uid: &str) -> Self {
        Self::new(Kind::Pod, uid)
    }

    /// The record of a config map.
    pub(crate) fn config_map(namespace: &str, name: &str) -> Self {
        Self::new(Kind::ConfigMap, format!("{namespace}/{name}"))
    }

    /// The record of a secret.
    pub(crate) fn secret(namespace: &str, name: &str) -> Self {
        Self::new(Kind::Secret, format!("{namespace}/{name}"))
    }

    /// The record of a namespace's services.
    pub(crate) fn services(namespace: &str) -> Self {
        Self::new(Kind::Services, namespace)
    }

    /// The record of the names of a namespace's services.
    pub(crate) fn service_names(namespace: &str) -> Self {
        Self::new(Kind::ServiceNames, namespace)
    }

    /// The record of a namespace's EndpointSlices.
    pub(crate) fn slices(namespace: &str) -> Self {
        Self::new(Kind::Slices, namespace)
    }

    /// The record of a RuntimeClass.
    pub(crate) fn runtime_class(name: &str) -> Self {
        Self::new(Kind::RuntimeClass, name)
    }

    /// The record of a pod's token: by the pod's uid, the account, the audience and the requested seconds.
    pub(crate) fn token(uid: &str, account: &str, audience: Option<&str>, seconds: i64) -> Self {
        Self::new(Kind::Token, format!("{uid}/{account}/{seconds}/{}", audience.unwrap_or_default()))
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Name of the file. It is a digest, because namespace and name together may be longer than a file name.
    pub(crate) fn file_name(&self) -> OsString {
        let digest = Sha256::digest(self.name.as_bytes());
        OsString::from(format!("{}.{}", hex::encode(&digest[..16]), super::files::EXTENSION))
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.kind.directory(), self.name)
    }
}
