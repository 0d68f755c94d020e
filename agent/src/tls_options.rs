//! TLS versions and cipher suites of the kubelet API, by the names of the kubelet's settings.

use rustls::crypto::CryptoProvider;
use rustls::version::TLS13;
use rustls::{ALL_VERSIONS, SupportedProtocolVersion};

/// TLS versions and cipher suites of a server. The default allows all versions and suites of the TLS library.
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

    /// The cryptography provider with the configured cipher suites.
    pub(crate) fn provider(&self) -> Result<CryptoProvider, String> {
        coracle_cipher_suites::provider(&self.cipher_suites)
    }

    /// The accepted versions of TLS.
    pub(crate) fn versions(&self) -> &'static [&'static SupportedProtocolVersion] {
        if self.requires_tls13 { &ONLY_13 } else { ALL_VERSIONS }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_cipher_suites_are_refused() {
        let of = |suite: &str| TlsOptions { cipher_suites: vec![suite.to_owned()], ..TlsOptions::default() };
        assert!(of("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256").check().is_ok());
        let error = of("TLS_RSA_WITH_AES_256_GCM_SHA384").check().unwrap_err();
        assert!(error.contains("supported are TLS_"), "{error}");
    }

    #[test]
    fn tls_1_2_can_be_refused() {
        let only = TlsOptions { requires_tls13: true, ..TlsOptions::default() };
        assert_eq!(only.versions(), [&TLS13]);
        assert_eq!(TlsOptions::default().versions().len(), 2);
    }
}
