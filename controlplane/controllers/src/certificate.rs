//! The contents of a certificate signing request, and the rules of the Kubernetes signers.
//!
//! The rules are from "Certificate Signing Requests" in the Kubernetes documentation, section "Kubernetes signers".

use std::collections::BTreeSet;
use std::net::IpAddr;

use coracle_certificate_subject::Subject;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::pem::parse_x509_pem;
use x509_parser::prelude::FromDer;

/// Signer of client certificates for any user.
pub(crate) const CLIENT: &str = "kubernetes.io/kube-apiserver-client";
/// Signer of client certificates for nodes.
pub(crate) const NODE_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
/// Signer of serving certificates for nodes.
pub(crate) const NODE_SERVING: &str = "kubernetes.io/kubelet-serving";

const UNREADABLE: &str = "the request cannot be read";
const ADMINISTRATORS: &str = "system:masters";
/// Common names of API servers. Nodes authorize these names.
const SERVERS: [&str; 2] = ["kube-apiserver-kubelet-client", "system:kube-apiserver"];
const NODES: &str = "system:nodes";
pub(crate) const NODE_PREFIX: &str = "system:node:";

/// Subject, alternative names and key of a request: all fields that the certificate gets. The approving and the signing
/// controller use the same parsed form, so that both read a request in the same way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestedCertificate {
    pub(crate) common_name: String,
    pub(crate) organizations: Vec<String>,
    pub(crate) dns: Vec<String>,
    pub(crate) addresses: Vec<IpAddr>,
    /// Mail addresses in the alternative names.
    pub(crate) mails: Vec<String>,
    /// URIs in the alternative names.
    pub(crate) uris: Vec<String>,
    /// Number of alternative names of other types.
    pub(crate) others: usize,
    /// The public key of the request (SubjectPublicKeyInfo, DER).
    pub(crate) key: Vec<u8>,
}

impl RequestedCertificate {
    /// Parses a request.
    ///
    /// # Errors
    /// The text is not a request, or its subject is ambiguous.
    pub(crate) fn read(pem: &[u8]) -> Result<Self, String> {
        let (_, pem) = parse_x509_pem(pem).map_err(|_malformed| UNREADABLE)?;
        let (_, request) =
            X509CertificationRequest::from_der(&pem.contents).map_err(|_malformed| UNREADABLE)?;
        request.verify_signature().map_err(|_wrong| "the request is not signed with its own key")?;
        Self::unverified(&request)
    }

    /// The contents of a request. The signature is not checked.
    pub(crate) fn unverified(request: &X509CertificationRequest<'_>) -> Result<Self, String> {
        let info = &request.certification_request_info;
        let Subject { common_name, organizations } = Subject::read(&info.subject)?;
        let key = info.subject_pki.raw.to_vec();
        let mut requested = Self { common_name, organizations, key, ..Self::default() };
        for extension in request.requested_extensions().into_iter().flatten() {
            if let ParsedExtension::SubjectAlternativeName(names) = extension {
                names.general_names.iter().for_each(|name| requested.take(name));
            }
        }
        Ok(requested)
    }

    fn take(&mut self, name: &GeneralName<'_>) {
        match name {
            GeneralName::DNSName(name) => self.dns.push((*name).to_owned()),
            GeneralName::RFC822Name(name) => self.mails.push((*name).to_owned()),
            GeneralName::URI(name) => self.uris.push((*name).to_owned()),
            GeneralName::IPAddress(bytes) => match address(bytes) {
                Some(address) => self.addresses.push(address),
                None => self.others += 1,
            },
            _ => self.others += 1,
        }
    }

    /// The node name in the subject.
    pub(crate) fn node(&self) -> Option<&str> {
        self.common_name.strip_prefix(NODE_PREFIX).filter(|name| !name.is_empty())
    }

    /// The reason why the signer with this name must refuse the request. `None` if the signer may sign.
    pub(crate) fn refusal(&self, signer: &str, usages: &[String]) -> Option<String> {
        let refused = match signer {
            CLIENT => self.client(usages),
            NODE_CLIENT => self.node_client(usages),
            NODE_SERVING => self.node_serving(usages),
            other => Err(format!("the signer {other} is not ours")),
        };
        refused.err()
    }

    /// Refuses the group of administrators and the names of API servers: every part of the cluster trusts a certificate
    /// with this group or these names.
    fn client(&self, usages: &[String]) -> Result<(), String> {
        if self.organizations.iter().any(|group| group == ADMINISTRATORS) {
            return Err(format!("certificates of the group {ADMINISTRATORS} are not signed on request"));
        }
        if SERVERS.contains(&self.common_name.as_str()) {
            return Err(format!("the name {} is a name of the API server", self.common_name));
        }
        if self.organizations.len() > 1 {
            return Err("subjects of more than one organization are not supported".to_owned());
        }
        if self.others > 0 {
            let kinds = "DNS names, IP addresses, mail addresses and URIs";
            return Err(format!("subjectAltNames other than {kinds} are not supported"));
        }
        client_usages(usages)
    }

    fn node_client(&self, usages: &[String]) -> Result<(), String> {
        self.check_organization()?;
        if !self.dns.is_empty() || !self.addresses.is_empty() || self.has_other_names() {
            return Err("a node's client certificate has no subject alternative names".to_owned());
        }
        exact_usages(usages, "client auth")?;
        self.check_common_name()
    }

    fn node_serving(&self, usages: &[String]) -> Result<(), String> {
        self.check_organization()?;
        if self.dns.is_empty() && self.addresses.is_empty() {
            return Err("DNS or IP subjectAltName is required".to_owned());
        }
        if self.has_other_names() {
            return Err("subjectAltNames other than DNS names and IP addresses are not allowed".to_owned());
        }
        exact_usages(usages, "server auth")?;
        self.check_common_name()
    }

    fn has_other_names(&self) -> bool {
        !self.mails.is_empty() || !self.uris.is_empty() || self.others > 0
    }

    fn check_organization(&self) -> Result<(), String> {
        let right = self.organizations == [NODES];
        right.then_some(()).ok_or_else(|| format!("subject organization is not {NODES}"))
    }

    fn check_common_name(&self) -> Result<(), String> {
        let right = self.node().is_some();
        right.then_some(()).ok_or_else(|| format!("subject common name does not begin with {NODE_PREFIX}"))
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        16 => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        _ => None,
    }
}

/// Requires exactly the usages of one side of TLS; `key encipherment` (RSA) is optional.
fn exact_usages(usages: &[String], side: &str) -> Result<(), String> {
    let mut given: BTreeSet<&str> = usages.iter().map(String::as_str).collect();
    given.remove("key encipherment");
    let right = given == BTreeSet::from(["digital signature", side]);
    right.then_some(()).ok_or_else(|| format!("usages did not match {side:?} and \"digital signature\""))
}

fn client_usages(usages: &[String]) -> Result<(), String> {
    let allowed = ["key encipherment", "digital signature", "client auth"];
    if !usages.iter().any(|usage| usage == "client auth") {
        return Err("expected the usage \"client auth\"".to_owned());
    }
    match usages.iter().find(|usage| !allowed.contains(&usage.as_str())) {
        Some(other) => Err(format!("the usage {other:?} is not allowed")),
        None => Ok(()),
    }
}

#[cfg(test)]
pub(crate) mod tests;
