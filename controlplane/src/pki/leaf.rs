//! Leaf certificates: requirements, check, creation.

use std::{net::IpAddr, time::Duration};

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose,
    SanType, date_time_ymd,
};
use x509_parser::{
    extensions::GeneralName,
    pem::parse_x509_pem,
    prelude::{FromDer as _, X509Certificate},
};

const HOUR: Duration = Duration::from_secs(3600);
const TEN_YEARS: Duration = Duration::from_secs(3653 * 24 * 3600);
/// Remaining validity below which a certificate is replaced.
const RENEW_BEFORE: i64 = 30 * 24 * 3600;

/// The requirements of a certificate.
#[derive(Clone, Debug)]
pub struct Leaf {
    /// The common name: the user, for client certificates.
    pub common_name: String,
    /// The organization: the group, for client certificates.
    pub organization: Option<String>,
    /// Whether the certificate is for a server or for a client.
    pub usage: Usage,
    /// DNS names.
    pub names: Vec<String>,
    /// Addresses.
    pub addresses: Vec<IpAddr>,
}

/// A new certificate with its key, in PEM.
pub(super) struct Issued {
    pub(super) certificate: String,
    pub(super) key: String,
}

/// The side of a connection that a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    /// The server side.
    Server,
    /// The client side.
    Client,
}

impl Leaf {
    /// A client certificate.
    #[must_use]
    pub fn client(user: &str, group: Option<&str>) -> Self {
        Self {
            common_name: user.to_owned(),
            organization: group.map(str::to_owned),
            usage: Usage::Client,
            names: Vec::new(),
            addresses: Vec::new(),
        }
    }

    /// Whether a certificate still fits: its key, this CA, these names, and enough remaining validity.
    pub(super) fn accepts(&self, certificate: &str, key: &str, authority: &str) -> bool {
        let met = || {
            let (_, own) = parse_x509_pem(certificate.as_bytes()).ok()?;
            let (_, own) = X509Certificate::from_der(&own.contents).ok()?;
            let (_, authority) = parse_x509_pem(authority.as_bytes()).ok()?;
            let (_, authority) = X509Certificate::from_der(&authority.contents).ok()?;
            let key = KeyPair::from_pem(key).ok()?;
            let signed = own.verify_signature(Some(authority.public_key())).is_ok();
            let fits = own.public_key().subject_public_key.data.as_ref() == key.public_key_raw();
            let until = own.validity().not_after.timestamp();
            let lasts = until > jiff::Timestamp::now().as_second() + RENEW_BEFORE;
            Some(signed && fits && lasts && self.names_match(&own))
        };
        met().unwrap_or(false)
    }

    fn names_match(&self, certificate: &X509Certificate<'_>) -> bool {
        let subject = certificate.subject();
        let common_name = subject.iter_common_name().next().and_then(|name| name.as_str().ok());
        let organization = subject.iter_organization().next().and_then(|name| name.as_str().ok());
        let alternatives = certificate.subject_alternative_name().ok().flatten();
        let found = alternatives.map(|names| names.value.general_names.as_slice()).unwrap_or_default();
        let has_name =
            |name: &String| found.iter().any(|one| matches!(one, GeneralName::DNSName(dns) if dns == name));
        let has_address = |address: &IpAddr| {
            found.iter().any(|one| matches!(one, GeneralName::IPAddress(bytes) if *bytes == octets(*address)))
        };
        common_name == Some(&self.common_name)
            && organization == self.organization.as_deref()
            && self.names.iter().all(has_name)
            && self.addresses.iter().all(has_address)
    }

    /// Creates a certificate and key in PEM.
    pub(super) fn issue(&self, authority: &Issuer<'_, KeyPair>) -> Result<Issued, rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, self.common_name.as_str());
        if let Some(organization) = &self.organization {
            params.distinguished_name.push(DnType::OrganizationName, organization.as_str());
        }
        for name in &self.names {
            params.subject_alt_names.push(SanType::DnsName(name.as_str().try_into()?));
        }
        params.subject_alt_names.extend(self.addresses.iter().map(|address| SanType::IpAddress(*address)));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![match self.usage {
            Usage::Server => ExtendedKeyUsagePurpose::ServerAuth,
            Usage::Client => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params);
        let certificate = params.signed_by(&key, authority)?;
        Ok(Issued { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

/// The validity: from one hour ago, for ten years.
pub(super) fn set_validity(params: &mut CertificateParams) {
    let now = u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or(0);
    let start = date_time_ymd(1970, 1, 1) + Duration::from_secs(now.saturating_sub(HOUR.as_secs()));
    params.not_before = start;
    params.not_after = start + TEN_YEARS;
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}
