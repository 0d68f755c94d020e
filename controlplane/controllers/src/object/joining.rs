//! Kinds for joining machines and for node heartbeats.

use std::collections::BTreeMap;

use coracle_values::resource;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequestCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use serde::Deserialize;

use super::Object;

/// A certificate signing request.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct CertificateSigningRequest {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: SigningRequestSpec,
    pub(crate) status: SigningRequestStatus,
}

/// The requested certificate and the requesting user.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct SigningRequestSpec {
    /// The PKCS#10 request in PEM.
    pub(crate) request: ByteString,
    pub(crate) signer_name: String,
    pub(crate) usages: Vec<String>,
    pub(crate) expiration_seconds: Option<i64>,
    pub(crate) username: String,
    pub(crate) uid: Option<String>,
    pub(crate) groups: Vec<String>,
    pub(crate) extra: BTreeMap<String, Vec<String>>,
}

/// The decision and the certificate.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SigningRequestStatus {
    pub(crate) conditions: Vec<CertificateSigningRequestCondition>,
    pub(crate) certificate: Option<ByteString>,
}

impl CertificateSigningRequest {
    /// The condition of this type.
    pub(crate) fn condition(&self, type_: &str) -> Option<&CertificateSigningRequestCondition> {
        self.status.conditions.iter().find(|condition| condition.type_ == type_)
    }

    /// Whether the request was approved or denied.
    pub(crate) fn is_decided(&self) -> bool {
        self.condition("Approved").is_some() || self.condition("Denied").is_some()
    }
}

/// A Secret, of a bootstrap token or a service account.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Secret {
    pub(crate) metadata: ObjectMeta,
    pub(crate) data: BTreeMap<String, ByteString>,
}

impl Secret {
    /// The value of a key as text.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        std::str::from_utf8(&self.data.get(key)?.0).ok()
    }
}

/// The lease of a node, which is its heartbeat.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Lease {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: LeaseSpec,
}

/// The spec of a lease.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct LeaseSpec {
    pub(crate) renew_time: Option<MicroTime>,
}

resource!(
    CertificateSigningRequest,
    "certificates.k8s.io",
    "certificatesigningrequests",
    ClusterResourceScope
);
resource!(Secret, "", "secrets", NamespaceResourceScope);
resource!(Lease, "coordination.k8s.io", "leases", NamespaceResourceScope);

impl Object for CertificateSigningRequest {}
impl Object for Secret {}
impl Object for Lease {}
