//! What a certificate signing request asks for, and the rules of Kubernetes' own signers.
//!
//! The rules are those of "Certificate Signing Requests" in the Kubernetes documentation, section "Kubernetes
//! signers".

use std::collections::BTreeSet;
use std::net::IpAddr;

use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::pem::parse_x509_pem;
use x509_parser::prelude::FromDer;

/// Client certificates of anybody.
pub(crate) const CLIENT: &str = "kubernetes.io/kube-apiserver-client";
/// Client certificates of nodes.
pub(crate) const NODE_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
/// Serving certificates of nodes.
pub(crate) const NODE_SERVING: &str = "kubernetes.io/kubelet-serving";

const NODES: &str = "system:nodes";
const NODE_PREFIX: &str = "system:node:";

/// Subject and alternative names of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) common_name: String,
    pub(crate) organizations: Vec<String>,
    pub(crate) dns: Vec<String>,
    pub(crate) addresses: Vec<IpAddr>,
    /// Names of other sorts: mail addresses, URIs and rarer ones.
    pub(crate) others: usize,
}

impl Asked {
    /// Reads a request; nothing when it is none.
    pub(crate) fn read(pem: &[u8]) -> Option<Self> {
        let (_, pem) = parse_x509_pem(pem).ok()?;
        let (_, request) = X509CertificationRequest::from_der(&pem.contents).ok()?;
        let subject = &request.certification_request_info.subject;
        let common_name = subject.iter_common_name().next().and_then(|name| name.as_str().ok());
        let mut asked = Self {
            common_name: common_name.unwrap_or_default().to_owned(),
            organizations: subject
                .iter_organization()
                .map(|name| name.as_str().map(str::to_owned).ok())
                .collect::<Option<_>>()?,
            ..Self::default()
        };
        for extension in request.requested_extensions().into_iter().flatten() {
            if let ParsedExtension::SubjectAlternativeName(names) = extension {
                names.general_names.iter().for_each(|name| asked.take(name));
            }
        }
        Some(asked)
    }

    fn take(&mut self, name: &GeneralName<'_>) {
        match name {
            GeneralName::DNSName(name) => self.dns.push((*name).to_owned()),
            GeneralName::IPAddress(bytes) => match address(bytes) {
                Some(address) => self.addresses.push(address),
                None => self.others += 1,
            },
            _ => self.others += 1,
        }
    }

    /// The node that the subject names.
    pub(crate) fn node(&self) -> Option<&str> {
        self.common_name.strip_prefix(NODE_PREFIX).filter(|name| !name.is_empty())
    }

    /// Why the signer of this name must refuse; nothing when it may sign.
    pub(crate) fn refusal(&self, signer: &str, usages: &[String]) -> Option<String> {
        let refused = match signer {
            CLIENT => client_usages(usages),
            NODE_CLIENT => self.node_client(usages),
            NODE_SERVING => self.node_serving(usages),
            other => Err(format!("the signer {other} is not ours")),
        };
        let one = if self.organizations.len() > 1 && signer == CLIENT {
            Err("subjects of more than one organization are not supported".to_owned())
        } else {
            Ok(())
        };
        refused.and(one).err()
    }

    fn node_client(&self, usages: &[String]) -> Result<(), String> {
        self.is_of_nodes()?;
        if !self.dns.is_empty() || !self.addresses.is_empty() || self.others > 0 {
            return Err("a node's client certificate has no subject alternative names".to_owned());
        }
        exact_usages(usages, "client auth")?;
        self.is_of_a_node()
    }

    fn node_serving(&self, usages: &[String]) -> Result<(), String> {
        self.is_of_nodes()?;
        if self.dns.is_empty() && self.addresses.is_empty() {
            return Err("DNS or IP subjectAltName is required".to_owned());
        }
        if self.others > 0 {
            return Err("subjectAltNames other than DNS names and IP addresses are not allowed".to_owned());
        }
        exact_usages(usages, "server auth")?;
        self.is_of_a_node()
    }

    fn is_of_nodes(&self) -> Result<(), String> {
        let right = self.organizations == [NODES];
        right.then_some(()).ok_or_else(|| format!("subject organization is not {NODES}"))
    }

    fn is_of_a_node(&self) -> Result<(), String> {
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

/// Exactly the use on one side of TLS; an RSA key may also encipher.
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
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    fn node(names: &[&str]) -> CertificateParams {
        let mut params =
            CertificateParams::new(names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>()).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "system:node:a");
        params.distinguished_name.push(DnType::OrganizationName, NODES);
        params
    }

    fn read(params: &CertificateParams) -> Asked {
        let request = params.serialize_request(&KeyPair::generate().unwrap()).unwrap();
        Asked::read(request.pem().unwrap().as_bytes()).unwrap()
    }

    fn words(list: &[&str]) -> Vec<String> {
        list.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn a_request_is_read() {
        let asked = read(&node(&["a", "192.0.2.1"]));
        assert_eq!((asked.node(), asked.dns.as_slice()), (Some("a"), &["a".to_owned()][..]));
        assert_eq!(asked.addresses, ["192.0.2.1".parse::<IpAddr>().unwrap()]);
        assert_eq!(Asked::read(b"nonsense"), None);
    }

    #[test]
    fn a_nodes_client_certificate_says_that_and_no_more() {
        let usages = words(&["digital signature", "client auth"]);
        let good = read(&node(&[]));
        assert_eq!(good.refusal(NODE_CLIENT, &usages), None);
        assert_eq!(
            good.refusal(NODE_CLIENT, &words(&["key encipherment", "digital signature", "client auth"])),
            None
        );
        for wrong in [
            &["client auth"][..],
            &["digital signature", "server auth"],
            &["any", "digital signature", "client auth"],
        ] {
            assert!(good.refusal(NODE_CLIENT, &words(wrong)).is_some(), "{wrong:?}");
        }
        assert!(read(&node(&["a"])).refusal(NODE_CLIENT, &usages).is_some());
        for change in [
            |asked: &mut Asked| asked.common_name = "root".to_owned(),
            |asked: &mut Asked| asked.common_name = "system:node:".to_owned(),
            |asked: &mut Asked| asked.organizations = vec!["system:masters".to_owned()],
            |asked: &mut Asked| asked.organizations.push("system:masters".to_owned()),
            |asked: &mut Asked| asked.organizations.clear(),
        ] {
            let mut wrong = good.clone();
            change(&mut wrong);
            assert!(wrong.refusal(NODE_CLIENT, &usages).is_some(), "{wrong:?}");
        }
    }

    #[test]
    fn a_nodes_serving_certificate_names_hosts() {
        let usages = words(&["digital signature", "server auth"]);
        assert_eq!(read(&node(&["a"])).refusal(NODE_SERVING, &usages), None);
        assert!(read(&node(&[])).refusal(NODE_SERVING, &usages).is_some());
        let mut mail = node(&["a"]);
        mail.subject_alt_names.push(SanType::Rfc822Name("a@b".try_into().unwrap()));
        assert!(read(&mail).refusal(NODE_SERVING, &usages).is_some());
        assert!(
            read(&node(&["a"]))
                .refusal(NODE_SERVING, &words(&["digital signature", "client auth"]))
                .is_some()
        );
    }

    #[test]
    fn anybodys_client_certificate_is_for_clients() {
        let asked = read(&node(&["a"]));
        assert_eq!(asked.refusal(CLIENT, &words(&["client auth"])), None);
        assert!(asked.refusal(CLIENT, &words(&["client auth", "cert sign"])).is_some());
        assert!(asked.refusal(CLIENT, &words(&["digital signature"])).is_some());
        assert!(asked.refusal("example.com/other", &words(&["client auth"])).is_some());
    }
}
