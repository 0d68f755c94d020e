//! The user and the groups that the subject of a certificate signing request names.
//!
//! The API server admits requests, and the controllers approve and sign them. Both must read a subject in the same way,
//! or the signed name could differ from the checked name. So both use this crate.

use x509_parser::asn1_rs::Tag;
use x509_parser::oid_registry::{OID_X509_COMMON_NAME, OID_X509_ORGANIZATION_NAME};
use x509_parser::x509::{AttributeTypeAndValue, X509Name};

/// Common name and organizations of an unambiguous subject.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subject {
    /// The common name: the user.
    pub common_name: String,
    /// The organizations: the groups of the user.
    pub organizations: Vec<String>,
}

// === impl Subject ===

impl Subject {
    /// Reads a subject.
    ///
    /// # Errors
    /// The subject is ambiguous, or has an attribute other than common name and organization. Programs disagree on
    /// which of two common names they use, and on how they read several values in one part.
    pub fn read(name: &X509Name<'_>) -> Result<Self, String> {
        let (mut common_names, mut organizations) = (Vec::new(), Vec::new());
        for part in name.iter() {
            let mut attributes = part.iter();
            let (Some(attribute), None) = (attributes.next(), attributes.next()) else {
                return Err("a part of the subject must have exactly one value".to_owned());
            };
            let list = match attribute.attr_type() {
                kind if *kind == OID_X509_COMMON_NAME => &mut common_names,
                kind if *kind == OID_X509_ORGANIZATION_NAME => &mut organizations,
                other => {
                    let only = "only a common name and organizations are supported";
                    return Err(format!("the subject has the attribute {other}; {only}"));
                }
            };
            list.push(plain_text(attribute)?);
        }
        match <[String; 1]>::try_from(common_names) {
            Ok([name]) if name.is_empty() => Err("the subject has an empty common name".to_owned()),
            Ok([common_name]) => Ok(Self { common_name, organizations }),
            Err(names) => Err(format!("the subject has {} common names, not one", names.len())),
        }
    }
}

/// A UTF-8 or printable string without control characters. All programs read these two types in the same way.
fn plain_text(attribute: &AttributeTypeAndValue<'_>) -> Result<String, String> {
    let usual = matches!(attribute.attr_value().tag(), Tag::Utf8String | Tag::PrintableString);
    let text = attribute.as_str().ok().filter(|text| usual && !text.chars().any(char::is_control));
    text.map(str::to_owned).ok_or_else(|| {
        "the subject has a text of an unusual type; use UTF8String without control characters".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
    use x509_parser::certificate::X509Certificate;
    use x509_parser::prelude::FromDer as _;

    use super::*;

    fn read(attributes: &[(DnType, &str)]) -> Result<Subject, String> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for (kind, text) in attributes {
            params.distinguished_name.push(kind.clone(), *text);
        }
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let (_, certificate) = X509Certificate::from_der(certificate.der()).unwrap();
        Subject::read(certificate.subject())
    }

    // The tests of the API server and of the controllers cover subjects that rcgen cannot create.
    #[test]
    fn a_subject_has_one_common_name_and_organizations() {
        let subject =
            read(&[(DnType::CommonName, "system:node:a"), (DnType::OrganizationName, "system:nodes")]);
        let organizations = vec!["system:nodes".to_owned()];
        assert_eq!(subject, Ok(Subject { common_name: "system:node:a".to_owned(), organizations }));
        let refused = |attributes: &[(DnType, &str)], why: &str| {
            let error = read(attributes).unwrap_err();
            assert!(error.contains(why), "{error}");
        };
        refused(&[(DnType::OrganizationName, "system:nodes")], "0 common names");
        refused(&[(DnType::CommonName, "")], "empty common name");
        refused(&[(DnType::CommonName, "a\u{7}")], "unusual type");
        refused(
            &[(DnType::CommonName, "a"), (DnType::CountryName, "DE")],
            "only a common name and organizations",
        );
    }
}
