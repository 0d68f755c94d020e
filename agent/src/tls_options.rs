//! TLS versions and cipher suites of the kubelet API, by the names of the kubelet's settings.

use rustls::crypto::{CryptoProvider, ring};
use rustls::version::TLS13;
use rustls::{ALL_VERSIONS, SupportedProtocolVersion};

/// TLS versions and cipher suites of a server. The default has all that the library supports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsOptions {
    /// Whether TLS 1.2 is refused.
    pub requires_tls13: bool,
    /// Cipher suites of TLS 1.2 by their names in Go; empty for all supported ones. The suites of TLS 1.3 are always in
    /// use, as in Go.
    pub cipher_suites: Vec<String>,
}

static ONLY_13: [&SupportedProtocolVersion; 1] = [&TLS13];

// === impl TlsOptions ===

impl TlsOptions {
    /// Checks the names of the cipher suites.
    ///
    /// # Errors
    /// The name of an unknown cipher suite, with the supported ones.
    pub fn check(&self) -> Result<(), String> {
        self.provider().map(drop)
    }

    /// The cryptography with the chosen cipher suites.
    pub(crate) fn provider(&self) -> Result<CryptoProvider, String> {
        let mut provider = ring::default_provider();
        let name_of = |suite: &rustls::SupportedCipherSuite| go_name(&format!("{:?}", suite.suite()));
        let known: Vec<String> = provider.cipher_suites.iter().map(name_of).collect();
        let chosen: Vec<String> = self.cipher_suites.iter().map(|name| go_name(name)).collect();
        if let Some(unknown) = chosen.iter().find(|name| !known.contains(name)) {
            return Err(format!(
                "cipher suite {unknown} is not supported; supported are {}",
                known.join(", ")
            ));
        }
        let is_chosen = |suite: &rustls::SupportedCipherSuite| {
            chosen.is_empty() || suite.version() == &TLS13 || chosen.contains(&name_of(suite))
        };
        provider.cipher_suites.retain(is_chosen);
        Ok(provider)
    }

    /// The versions of TLS.
    pub(crate) fn versions(&self) -> &'static [&'static SupportedProtocolVersion] {
        if self.requires_tls13 { &ONLY_13 } else { ALL_VERSIONS }
    }
}

/// The name of a cipher suite in Go. Go also accepts two names without their hash.
fn go_name(name: &str) -> String {
    let name = name.replacen("TLS13_", "TLS_", 1);
    if name.ends_with("_CHACHA20_POLY1305") { format!("{name}_SHA256") } else { name }
}

#[cfg(test)]
mod tests {
    use rustls::version::TLS12;

    use super::*;

    fn of(suites: &[&str]) -> TlsOptions {
        let cipher_suites = suites.iter().map(|&suite| suite.to_owned()).collect();
        TlsOptions { cipher_suites, ..TlsOptions::default() }
    }

    #[test]
    fn chosen_cipher_suites_replace_those_of_tls_1_2() {
        let suites = |options: &TlsOptions, of_tls12: bool| {
            let suites = options.provider().unwrap().cipher_suites;
            suites.iter().filter(|suite| (suite.version() == &TLS12) == of_tls12).count()
        };
        assert_eq!((suites(&of(&[]), true), suites(&of(&[]), false)), (6, 3));
        let chosen = of(&["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305"]);
        assert_eq!((suites(&chosen, true), suites(&chosen, false)), (2, 3));
        let error = of(&["TLS_RSA_WITH_AES_256_GCM_SHA384"]).check().unwrap_err();
        assert!(error.contains("TLS_RSA_WITH_AES_256_GCM_SHA384 is not supported; supported are"), "{error}");
    }

    #[test]
    fn tls_1_2_can_be_refused() {
        let only = TlsOptions { requires_tls13: true, ..TlsOptions::default() };
        assert_eq!(only.versions(), [&TLS13]);
        assert_eq!(TlsOptions::default().versions().len(), 2);
    }
}
