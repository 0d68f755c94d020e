//! Certificate signing requests: creation, and the wait for the answer.

use std::net::IpAddr;
use std::time::Duration;

use coracle_watch::watch_object;
use futures::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec, CertificateSigningRequestStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use sha2::{Digest, Sha256};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::endpoint::Endpoint;
use super::error::JoinError;

/// The certificate to request.
#[derive(Clone, Debug)]
pub(super) struct RequestedIdentity {
    pub(super) user: String,
    names: Vec<String>,
    addresses: Vec<IpAddr>,
    pub(super) signer: &'static str,
    usage: &'static str,
}

/// A certificate and its key (PEM), and its validity.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) certificate: String,
    pub(super) key: String,
    from: jiff::Timestamp,
    until: jiff::Timestamp,
}

/// The reason why no certificate was issued.
#[derive(Debug)]
pub(super) enum Failure {
    Api(Box<kube::Error>),
    Join(JoinError),
}

impl RequestedIdentity {
    /// The client certificate of a node.
    pub(super) fn client(node: &str) -> Self {
        Self {
            user: format!("system:node:{node}"),
            names: Vec::new(),
            addresses: Vec::new(),
            signer: "kubernetes.io/kube-apiserver-client-kubelet",
            usage: "client auth",
        }
    }

    /// The serving certificate of a node.
    pub(super) fn serving(node: &str, addresses: Vec<IpAddr>) -> Self {
        Self {
            names: vec![node.to_owned()],
            addresses,
            signer: "kubernetes.io/kubelet-serving",
            usage: "server auth",
            ..Self::client(node)
        }
    }

    /// Whether a certificate has the requested user, names and addresses.
    pub(super) fn is_satisfied_by(&self, identity: &Identity) -> bool {
        let met = || {
            let der = CertificateDer::from_pem_slice(identity.certificate.as_bytes()).ok()?;
            let (_, certificate) = X509Certificate::from_der(&der).ok()?;
            let user = certificate.subject().iter_common_name().next()?.as_str().ok()?;
            let names =
                certificate.subject_alternative_name().ok()?.map(|names| names.value.general_names.clone());
            let names = names.unwrap_or_default();
            let has =
                |wanted: &dyn Fn(&x509_parser::extensions::GeneralName<'_>) -> bool| names.iter().any(wanted);
            use x509_parser::extensions::GeneralName::{DNSName, IPAddress};
            let named = self.names.iter().all(|name| has(&|one| matches!(one, DNSName(dns) if dns == name)));
            let octets = |address: &IpAddr| match address {
                IpAddr::V4(address) => address.octets().to_vec(),
                IpAddr::V6(address) => address.octets().to_vec(),
            };
            let placed = self
                .addresses
                .iter()
                .all(|address| has(&|one| matches!(one, IPAddress(bytes) if *bytes == octets(address))));
            Some(user == self.user && named && placed)
        };
        met().unwrap_or(false)
    }

    fn sign(&self, key: &KeyPair) -> Result<String, rcgen::Error> {
        let mut params = CertificateParams::new(self.names.clone())?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
        params.distinguished_name.push(DnType::CommonName, self.user.as_str());
        params.subject_alt_names.extend(self.addresses.iter().map(|address| SanType::IpAddress(*address)));
        params.serialize_request(key)?.pem()
    }

    /// The request object. Its name is derived from key and content, so that a retry with the same key finds the
    /// request.
    fn object(&self, key: &KeyPair) -> Result<CertificateSigningRequest, rcgen::Error> {
        let input = [key.public_key_pem().as_bytes(), self.user.as_bytes(), self.signer.as_bytes()].concat();
        let name = format!("node-csr-{}", hex::encode(Sha256::digest(input)));
        Ok(CertificateSigningRequest {
            metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() },
            spec: CertificateSigningRequestSpec {
                request: ByteString(self.sign(key)?.into_bytes()),
                signer_name: self.signer.to_owned(),
                usages: Some(vec!["digital signature".to_owned(), self.usage.to_owned()]),
                ..CertificateSigningRequestSpec::default()
            },
            status: None,
        })
    }
}

impl Identity {
    /// Parses certificate and key (PEM).
    pub(super) fn new(certificate: String, key: String) -> Result<Self, JoinError> {
        let unusable = |why: String| JoinError::Certificate(why);
        let der = CertificateDer::from_pem_slice(certificate.as_bytes())
            .map_err(|error| unusable(error.to_string()))?;
        let (_, parsed) = X509Certificate::from_der(&der).map_err(|error| unusable(error.to_string()))?;
        let time =
            |second: i64| jiff::Timestamp::from_second(second).map_err(|error| unusable(error.to_string()));
        let (from, until) =
            (time(parsed.validity().not_before.timestamp())?, time(parsed.validity().not_after.timestamp())?);
        drop(parsed);
        Ok(Self { certificate, key, from, until })
    }

    /// Whether the certificate is for this host.
    pub(super) fn is_for(&self, host: &str) -> bool {
        let found = || {
            let der = CertificateDer::from_pem_slice(self.certificate.as_bytes()).ok()?;
            let (_, certificate) = X509Certificate::from_der(&der).ok()?;
            let names = certificate.subject_alternative_name().ok()??;
            let is = |name: &GeneralName<'_>| matches!(name, GeneralName::DNSName(dns) if *dns == host);
            Some(names.value.general_names.iter().any(is))
        };
        found().unwrap_or(false)
    }

    /// End of validity.
    pub(super) fn not_after(&self) -> jiff::Timestamp {
        self.until
    }

    /// Whether the certificate has expired.
    pub(super) fn is_expired(&self, now: jiff::Timestamp) -> bool {
        now >= self.until
    }

    /// Remaining validity.
    pub(super) fn remaining(&self, now: jiff::Timestamp) -> Duration {
        Duration::try_from(self.until.duration_since(now)).unwrap_or_default()
    }

    /// Total validity.
    pub(super) fn lifetime(&self) -> Duration {
        Duration::try_from(self.until.duration_since(self.from)).unwrap_or_default()
    }

    /// Time at which the certificate is renewed: after this fraction of its lifetime (0.7 to 0.9).
    pub(super) fn renewal_time(&self, fraction: f64) -> jiff::Timestamp {
        let lifetime = self.until.duration_since(self.from).as_secs_f64();
        jiff::SignedDuration::try_from_secs_f64(lifetime * fraction)
            .ok()
            .and_then(|wait| self.from.checked_add(wait).ok())
            .unwrap_or(self.until)
    }
}

impl Failure {
    /// Whether a request exists that may still be answered.
    pub(super) fn is_unanswered(&self) -> bool {
        matches!(self, Self::Join(JoinError::Unanswered { .. }))
    }

    /// Whether the failure happened after the request was created: the request was denied, failed, or was not answered
    /// in time.
    pub(super) fn is_after_creation(&self) -> bool {
        matches!(self, Self::Join(JoinError::Refused { .. } | JoinError::Unanswered { .. }))
    }

    /// The error of joining at this endpoint.
    pub(super) fn at(self, endpoint: &Endpoint) -> JoinError {
        match self {
            Self::Join(error) => error,
            Self::Api(error) => match *error {
                kube::Error::Api(status) if status.code == 401 => JoinError::Setting(
                    "the cluster rejects the token: it has expired or may not be used for joining; `coracle token create` makes one"
                        .to_owned(),
                ),
                kube::Error::Api(status) => {
                    JoinError::Refused { user: "this machine".to_owned(), reason: status.message.clone() }
                }
                error => endpoint.unreachable(&error),
            },
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Api(error) => f.write_str(&coracle_error_chain::chain(&**error)),
            Self::Join(error) => error.fmt(f),
        }
    }
}

/// A new key.
pub(super) fn new_key() -> Result<KeyPair, JoinError> {
    KeyPair::generate().map_err(|error| JoinError::Certificate(error.to_string()))
}

/// Creates a request for this key, unless it exists, and waits for the answer. `limit` is the timeout. The cluster
/// removes unanswered requests after a day.
pub(super) async fn certificate(
    client: &Client,
    wanted: &RequestedIdentity,
    key: &KeyPair,
    limit: Duration,
) -> Result<Identity, Failure> {
    let unusable = |error: rcgen::Error| Failure::Join(JoinError::Certificate(error.to_string()));
    let object = wanted.object(key).map_err(unusable)?;
    let api: Api<CertificateSigningRequest> = Api::all(client.clone());
    match api.create(&PostParams::default(), &object).await {
        Err(kube::Error::Api(status)) if status.is_already_exists() => {}
        made => drop(made.map_err(|error| Failure::Api(Box::new(error)))?),
    }
    let name = object.metadata.name.unwrap_or_default();
    let answer = tokio::time::timeout(limit, answer(&api, &name, wanted)).await;
    let pem = answer.map_err(|_elapsed| {
        Failure::Join(JoinError::Unanswered { name: name.clone(), seconds: limit.as_secs() })
    })??;
    Identity::new(pem, key.serialize_pem()).map_err(Failure::Join)
}

async fn answer(
    api: &Api<CertificateSigningRequest>,
    name: &str,
    wanted: &RequestedIdentity,
) -> Result<String, Failure> {
    let refused = |reason: String| Failure::Join(JoinError::Refused { user: wanted.user.clone(), reason });
    let mut changes = watch_object(api.clone(), name);
    while let Some(change) = changes.next().await {
        match change {
            Ok(Some(request)) => match verdict(request.status.unwrap_or_default()) {
                Some(Ok(pem)) => return Ok(pem),
                Some(Err(reason)) => return Err(refused(reason)),
                None => {}
            },
            Ok(None) => return Err(refused(format!("the request {name} was deleted"))),
            Err(error) => {
                // The watch itself retries after a back-off.
                tracing::debug!(
                    error = coracle_error_chain::chain(&error),
                    "cannot watch the certificate request"
                );
            }
        }
    }
    Err(refused("the watch on the request ended".to_owned()))
}

/// The certificate, or the reason of the denial. None while there is no answer.
fn verdict(status: CertificateSigningRequestStatus) -> Option<Result<String, String>> {
    let conditions = status.conditions.unwrap_or_default();
    let against = conditions.into_iter().find(|one| matches!(one.type_.as_str(), "Denied" | "Failed"));
    if let Some(condition) = against {
        let message = condition.message.unwrap_or_default();
        return Some(Err(format!("{}: {message}", condition.type_)));
    }
    let pem = status.certificate.filter(|pem| !pem.0.is_empty())?;
    Some(String::from_utf8(pem.0).map_err(|_binary| "the certificate is not PEM".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(wanted: &RequestedIdentity) -> Identity {
        let key = KeyPair::generate().unwrap();
        let pem = wanted.sign(&key).unwrap();
        let mut params = rcgen::CertificateSigningRequestParams::from_pem(&pem).unwrap().params;
        params.not_before = rcgen::date_time_ymd(2026, 1, 1);
        params.not_after = rcgen::date_time_ymd(2026, 1, 11);
        Identity::new(params.self_signed(&key).unwrap().pem(), key.serialize_pem()).unwrap()
    }

    #[test]
    fn a_certificate_is_renewed_towards_its_end() {
        let identity = identity(&RequestedIdentity::client("a"));
        assert_eq!(identity.renewal_time(0.7).to_string(), "2026-01-08T00:00:00Z");
        assert_eq!(identity.renewal_time(0.9).to_string(), "2026-01-10T00:00:00Z");
        assert!(!identity.is_expired("2026-01-10T23:59:59Z".parse().unwrap()));
        assert!(identity.is_expired("2026-01-11T00:00:00Z".parse().unwrap()));
    }

    #[test]
    fn a_certificate_is_for_the_nodes_user_names_and_addresses() {
        let address: IpAddr = "192.0.2.1".parse().unwrap();
        let wanted = RequestedIdentity::serving("a", vec![address]);
        let there = identity(&wanted);
        assert!(wanted.is_satisfied_by(&there));
        assert!(RequestedIdentity::client("a").is_satisfied_by(&there));
        assert!(!RequestedIdentity::client("b").is_satisfied_by(&there));
        assert!(
            !RequestedIdentity::serving("a", vec![address, "2001:db8::1".parse().unwrap()])
                .is_satisfied_by(&there)
        );
    }

    #[test]
    fn an_answer_is_a_certificate_or_a_reason() {
        let status = |value| serde_json::from_value(value).unwrap();
        assert_eq!(verdict(status(serde_json::json!({}))), None);
        let denied =
            serde_json::json!({"conditions": [{"type": "Denied", "status": "True", "message": "no"}]});
        assert_eq!(verdict(status(denied)), Some(Err("Denied: no".to_owned())));
        assert_eq!(verdict(status(serde_json::json!({"certificate": "cGVt"}))), Some(Ok("pem".to_owned())));
    }
}
