//! Parsed command-line values: the bootstrap token, and the hash of the cluster's authority.

use std::fmt;
use std::str::FromStr;

use coracle_values::BootstrapToken;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use sha2::{Digest, Sha256};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::error::JoinError;

/// A bootstrap token, `id.secret`.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// The public part; the name of its Secret contains it.
    pub id: String,
    /// The secret part.
    pub secret: String,
}

/// The SHA-256 hash of an authority's public key (SubjectPublicKeyInfo), in kubeadm's form: `sha256:<hex>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaHash([u8; 32]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.<secret>", self.id)
    }
}

impl FromStr for Token {
    type Err = JoinError;

    fn from_str(text: &str) -> Result<Self, JoinError> {
        let BootstrapToken { id, secret } = BootstrapToken::parse(text).ok_or_else(|| {
            let why = "the token is not of the form id.secret: six and sixteen lower-case letters or digits";
            JoinError::Setting(why.to_owned())
        })?;
        Ok(Self { id: id.to_owned(), secret: secret.to_owned() })
    }
}

impl CaHash {
    /// The hash of the first certificate in a PEM text.
    ///
    /// # Errors
    /// When the text has no certificate.
    pub fn of(pem: &str) -> Result<Self, JoinError> {
        let unusable = |why: &dyn fmt::Display| {
            JoinError::ClusterInfo(format!("its authority is not a certificate: {why}"))
        };
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|error| unusable(&error))?;
        let (_, certificate) = X509Certificate::from_der(&der).map_err(|error| unusable(&error))?;
        Ok(Self(Sha256::digest(certificate.public_key().raw).into()))
    }
}

impl fmt::Display for CaHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", hex::encode(self.0))
    }
}

impl FromStr for CaHash {
    type Err = JoinError;

    fn from_str(text: &str) -> Result<Self, JoinError> {
        let wrong =
            || JoinError::Setting(format!("{text} is not of the form sha256:<64 hexadecimal digits>"));
        let digits = text.strip_prefix("sha256:").ok_or_else(wrong)?;
        let mut hash = [0; 32];
        hex::decode_to_slice(digits, &mut hash).map_err(|_malformed| wrong())?;
        Ok(Self(hash))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_an_id_and_a_secret_that_is_not_printed() {
        let token: Token = "abcdef.0123456789abcdef".parse().unwrap();
        assert_eq!((token.id.as_str(), token.secret.as_str()), ("abcdef", "0123456789abcdef"));
        assert!(!format!("{token:?}").contains(&token.secret));
        assert!("abcdef.0123456789abcde".parse::<Token>().is_err());
    }

    #[test]
    fn certificates_of_one_public_key_have_one_hash() {
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::default().self_signed(&key).unwrap();
        let hash = CaHash::of(&certificate.pem()).unwrap();
        let again = rcgen::CertificateParams::default().self_signed(&key).unwrap();
        assert_eq!(CaHash::of(&again.pem()).unwrap(), hash, "another certificate of the same key");
        assert_eq!(hash.to_string().parse::<CaHash>().unwrap(), hash);
        for wrong in ["", "sha256:", "sha256:00", "md5:00", &hash.to_string()[7..]] {
            assert!(wrong.parse::<CaHash>().is_err(), "{wrong}");
        }
        assert!(CaHash::of("nonsense").is_err());
    }
}
