//! The settings of the API server for requests, certificates and TLS.

use std::time::Duration;

use anyhow::Context as _;
use coracle_controlplane::{
    CertificateFiles, NamedCertificate, ServerOptions, ServingOptions, TolerationSeconds,
};

use super::super::value::{ByteSize, Fraction, GoDuration};
use super::ControlPlaneSettings;

impl ControlPlaneSettings {
    /// Options that kube-apiserver has, too, with the same defaults.
    pub(super) fn options(&self) -> anyhow::Result<ServerOptions> {
        let GoDuration(event_lifetime) = self.event_ttl;
        anyhow::ensure!(
            event_lifetime >= Duration::from_secs(1),
            "event-ttl {event_lifetime:?} must be at least 1s"
        );
        for issuer in &self.service_account_issuer {
            anyhow::ensure!(!issuer.is_empty(), "service-account-issuer must not have an empty name");
        }
        let keys_url = self.service_account_jwks_uri.clone();
        if let Some(url) = keys_url.as_deref().filter(|url| !url.starts_with("https://")) {
            anyhow::bail!("service-account-jwks-uri {url:?} must begin with https://");
        }
        let max_token_seconds = self.service_account_max_token_expiration.map(|limit| limit.0.as_secs());
        if let Some(seconds) = max_token_seconds {
            let is_allowed = (3600..=1 << 32).contains(&seconds);
            anyhow::ensure!(
                is_allowed,
                "service-account-max-token-expiration must be between 1h and 2^32 seconds"
            );
        }
        let bytes = |size: ByteSize| usize::try_from(size.0).unwrap_or(usize::MAX);
        Ok(ServerOptions {
            max_token_seconds: max_token_seconds.and_then(|seconds| i64::try_from(seconds).ok()),
            node_ports: self.service_node_port_range.0.clone(),
            toleration_seconds: TolerationSeconds {
                not_ready: self.default_not_ready_toleration_seconds,
                unreachable: self.default_unreachable_toleration_seconds,
            },
            event_lifetime,
            max_namespace_bytes: self.max_namespace_bytes.map(bytes),
            max_all_namespaces_bytes: self.max_all_namespaces_bytes.map(bytes),
            token_issuers: self.service_account_issuer.clone(),
            audiences: self.api_audiences.clone(),
            keys_url,
            extend_tokens: self.service_account_extend_token_expiration,
            min_watch: Duration::from_secs(self.min_request_timeout.into()),
            priority_and_fairness: self.enable_priority_and_fairness,
            strict_transport_security: transport_security(&self.strict_transport_security_directives)?,
            allowed_origins: allowed_origins(&self.cors_allowed_origins)?,
            goaway_chance: goaway_chance(self.goaway_chance)?,
            send_retry_after: self.shutdown_send_retry_after,
            watch_grace: self.shutdown_watch_termination_grace_period.0,
            // A setting of the node, see `Settings::external_ips`.
            external_ips: None,
            store: self.store(),
        })
    }

    /// Certificates and TLS of the API server.
    pub(super) fn serving_tls(&self) -> anyhow::Result<ServingOptions> {
        let certificate = match (self.apiserver_cert_file.clone(), self.apiserver_key_file.clone()) {
            (Some(certificate), Some(key)) => Some(CertificateFiles { certificate, key }),
            (None, None) => None,
            _ => anyhow::bail!("apiserver-cert-file and apiserver-key-file must be given together"),
        };
        let by_name = self.tls_sni_cert_key.iter().map(|entry| NamedCertificate {
            files: CertificateFiles { certificate: entry.certificate.clone(), key: entry.key.clone() },
            names: entry.names.clone(),
        });
        let options = ServingOptions {
            certificate,
            by_name: by_name.collect(),
            min_version: self.tls_min_version.clone(),
            cipher_suites: self.tls_cipher_suites.clone(),
        };
        options.check().map_err(anyhow::Error::msg).context("tls-min-version, tls-cipher-suites")?;
        Ok(options)
    }
}

/// The value of the header Strict-Transport-Security (RFC 6797, section 6.1); empty for none.
fn transport_security(directives: &[String]) -> anyhow::Result<String> {
    for directive in directives {
        let is_age = directive.strip_prefix("max-age=").is_some_and(|age| age.parse::<u32>().is_ok());
        anyhow::ensure!(
            is_age || matches!(directive.as_str(), "includeSubDomains" | "preload"),
            "strict-transport-security-directives {directive:?} must be max-age=SECONDS, includeSubDomains or preload"
        );
    }
    Ok(directives.join("; "))
}

/// Checks the expressions of CORS origins. As upstream, each expression must mark the start and the end of the host
/// (CVE-2022-1996).
fn allowed_origins(expressions: &[String]) -> anyhow::Result<Vec<String>> {
    for expression in expressions {
        let has = |marks: [&str; 2]| marks.iter().any(|mark| expression.contains(*mark));
        anyhow::ensure!(
            has(["^", "//"]) && has(["$", ":"]),
            "cors-allowed-origins {expression:?} must contain ^ or // before the host, and $ or : after it"
        );
    }
    Ok(expressions.to_vec())
}

/// Checks the probability of GOAWAY. As upstream, it is at most 0.02.
fn goaway_chance(Fraction(chance): Fraction) -> anyhow::Result<f64> {
    anyhow::ensure!(chance <= 0.02, "goaway-chance {chance} must be at most 0.02");
    Ok(chance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directives_of_transport_security_are_known() {
        let of =
            |all: &[&str]| transport_security(&all.iter().map(|&one| one.to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&[]).unwrap(), "");
        assert_eq!(
            of(&["max-age=9", "includeSubDomains", "preload"]).unwrap(),
            "max-age=9; includeSubDomains; preload"
        );
        for invalid in ["", "max-age", "max-age=x", "max-age=9\r\nx: y", "preload=1"] {
            assert!(of(&[invalid]).is_err(), "{invalid}");
        }
    }

    #[test]
    fn expressions_of_origins_have_a_start_and_an_end() {
        let of = |expression: &str| allowed_origins(&[expression.to_owned()]);
        assert_eq!(of("//a.example(:|$)").unwrap(), ["//a.example(:|$)"]);
        assert!(of("^https://a.example$").is_ok());
        for open in ["", "a.example", "^a.example", "a.example$"] {
            assert!(of(open).is_err(), "{open}");
        }
    }

    #[test]
    fn few_requests_ask_their_client_to_connect_again() {
        assert!(goaway_chance(Fraction(0.02)).is_ok());
        assert!(goaway_chance(Fraction(0.03)).is_err());
    }
}
