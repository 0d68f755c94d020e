//! Cipher suites of TLS servers, by their names in Go: the settings of kubelet and kube-apiserver use these names.

use rustls::SupportedCipherSuite;
use rustls::crypto::{CryptoProvider, ring};
use rustls::version::TLS13;

/// The cryptography with the chosen cipher suites; with all supported ones if none is chosen. The suites of TLS 1.3 are
/// always in use, as in Go.
///
/// # Errors
/// The name of an unknown cipher suite, with the supported ones.
pub fn provider(chosen: &[String]) -> Result<CryptoProvider, String> {
    let mut provider = ring::default_provider();
    let name_of = |suite: &SupportedCipherSuite| go_name(&format!("{:?}", suite.suite()));
    let known: Vec<String> = provider.cipher_suites.iter().map(name_of).collect();
    if let Some(unknown) = chosen.iter().find(|name| !known.contains(&go_name(name))) {
        return Err(format!("cipher suite {unknown:?} is not supported; supported are {}", known.join(", ")));
    }
    let chosen: Vec<String> = chosen.iter().map(|name| go_name(name)).collect();
    let is_chosen = |suite: &SupportedCipherSuite| {
        chosen.is_empty() || suite.version() == &TLS13 || chosen.contains(&name_of(suite))
    };
    provider.cipher_suites.retain(is_chosen);
    Ok(provider)
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

    fn of(names: &[&str]) -> Result<CryptoProvider, String> {
        provider(&names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn chosen_cipher_suites_replace_those_of_tls_1_2() {
        let suites = |names: &[&str], of_tls12: bool| {
            let suites = of(names).unwrap().cipher_suites;
            suites.iter().filter(|suite| (suite.version() == &TLS12) == of_tls12).count()
        };
        assert_eq!((suites(&[], true), suites(&[], false)), (6, 3));
        let chosen = ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305"];
        assert_eq!((suites(&chosen, true), suites(&chosen, false)), (2, 3));
        assert_eq!(of(&["TLS_AES_128_GCM_SHA256"]).unwrap().cipher_suites.len(), 3);
    }

    #[test]
    fn an_unknown_cipher_suite_is_named_with_the_supported_ones() {
        let error = of(&["TLS_RSA_WITH_AES_256_GCM_SHA384"]).unwrap_err();
        assert!(
            error.contains("\"TLS_RSA_WITH_AES_256_GCM_SHA384\" is not supported; supported are"),
            "{error}"
        );
        assert!(error.contains("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, "), "{error}");
    }
}
