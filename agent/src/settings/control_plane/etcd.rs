//! The settings of etcd.

use std::path::PathBuf;
use std::time::Duration;

use coracle_controlplane::{CertificateFiles, EtcdConfig, StoreOptions};

use super::super::value::GoDuration;
use super::ControlPlaneSettings;

impl ControlPlaneSettings {
    /// The connection to etcd. `None` without etcd servers.
    pub(super) fn etcd(&self) -> anyhow::Result<Option<EtcdConfig>> {
        anyhow::ensure!(
            self.etcd_servers_overrides.is_empty(),
            "etcd-servers-overrides is not supported: all resources must be in one etcd, because the revisions of several \
             etcds cannot be compared"
        );
        let compaction = compaction_interval(self.etcd_compaction_interval.0)?;
        let GoDuration(interval) = self.etcd_db_metric_poll_interval;
        let size_max_age = Some(interval).filter(|interval| !interval.is_zero());
        let (servers, prefix) = (self.etcd_servers.clone(), self.etcd_prefix.clone());
        let (ca_file, certificate) = (self.etcd_cafile.clone(), self.etcd_certfile.clone());
        let checked = etcd(servers, prefix, ca_file, certificate, self.etcd_keyfile.clone())?;
        Ok(checked.map(|etcd| EtcdConfig { compaction, size_max_age, ..etcd }))
    }

    /// Health checks and metrics of the store. As upstream, 0 means the default timeout.
    pub(super) fn store(&self) -> StoreOptions {
        let default = StoreOptions::default();
        let timeout = |GoDuration(set), default: Duration| if set.is_zero() { default } else { set };
        StoreOptions {
            health_timeout: timeout(self.etcd_healthcheck_timeout, default.health_timeout),
            ready_timeout: timeout(self.etcd_readycheck_timeout, default.ready_timeout),
            has_object_counts: !self.etcd_count_metric_poll_period.0.is_zero(),
        }
    }
}

/// Checks the connection to etcd. `None` without etcd servers.
fn etcd(
    servers: Vec<String>,
    prefix: String,
    ca_file: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
) -> anyhow::Result<Option<EtcdConfig>> {
    let has_files = ca_file.is_some() || certificate.is_some() || key.is_some();
    if servers.is_empty() {
        anyhow::ensure!(!has_files, "etcd-cafile, etcd-certfile and etcd-keyfile need etcd-servers");
        return Ok(None);
    }
    // The message does not contain the URL of the server, because the URL may have a password.
    let has_credentials = servers.iter().any(|server| server.contains('@'));
    anyhow::ensure!(
        !has_credentials,
        "etcd-servers must not contain a user: use etcd-certfile and etcd-keyfile"
    );
    for server in &servers {
        let is_url = ["http://", "https://"].iter().any(|scheme| server.starts_with(scheme));
        anyhow::ensure!(is_url, "etcd-servers {server:?} must begin with http:// or https://");
        let is_secured = !server.starts_with("https://") || ca_file.is_some();
        anyhow::ensure!(is_secured, "etcd-servers {server:?} needs etcd-cafile");
    }
    let is_prefix = !prefix.trim_matches('/').is_empty();
    anyhow::ensure!(is_prefix, "etcd-prefix {prefix:?} must have a name, as in /coracle");
    let identity = match (certificate, key) {
        (Some(certificate), Some(key)) => Some(CertificateFiles { certificate, key }),
        (None, None) => None,
        _ => anyhow::bail!("etcd-certfile and etcd-keyfile must be given together"),
    };
    Ok(Some(EtcdConfig { servers, prefix, ca_file, identity, compaction: None, size_max_age: None }))
}

/// Checks the interval of compactions. `None` for 0, which disables them. With less than 10 s, a server that loses etcd
/// for a moment would list everything again.
fn compaction_interval(interval: Duration) -> anyhow::Result<Option<Duration>> {
    let is_long = interval.is_zero() || interval >= Duration::from_secs(10);
    anyhow::ensure!(is_long, "etcd-compaction-interval {interval:?} must be 0 or at least 10s");
    Ok(Some(interval).filter(|interval| !interval.is_zero()))
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::super::super::sources::Sources;
    use super::super::super::table::Flags;
    use super::*;

    fn settings(words: &[&str]) -> ControlPlaneSettings {
        let command = Flags::<ControlPlaneSettings>::augment_args(clap::Command::new("x"));
        let matches = command.try_get_matches_from([&["x"][..], words].concat()).unwrap();
        let flags = Flags::<ControlPlaneSettings>::from_arg_matches(&matches).unwrap();
        flags.resolve(&mut Sources::default()).unwrap()
    }

    #[test]
    fn health_checks_and_metrics_of_etcd_have_upstreams_defaults() {
        let of = |words: &[&str]| {
            let settings = settings(&[&["--etcd-servers", "http://a:1"][..], words].concat());
            (settings.store(), settings.etcd().unwrap().unwrap().size_max_age)
        };
        let seconds = Duration::from_secs;
        assert_eq!(of(&[]), (StoreOptions::default(), Some(seconds(30))));
        let set = ["--etcd-healthcheck-timeout", "3s", "--etcd-readycheck-timeout", "4s"];
        let options =
            StoreOptions { health_timeout: seconds(3), ready_timeout: seconds(4), ..StoreOptions::default() };
        assert_eq!(of(&set).0, options);
        assert_eq!(of(&["--etcd-healthcheck-timeout", "0"]).0, StoreOptions::default());
        let (options, size_max_age) =
            of(&["--etcd-count-metric-poll-period", "0", "--etcd-db-metric-poll-interval", "0"]);
        assert_eq!((options.has_object_counts, size_max_age), (false, None));
    }

    #[test]
    fn resources_in_another_etcd_are_refused() {
        let refused = settings(&["--etcd-servers-overrides", "/events#http://a:1;http://b:1"]).etcd();
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("all resources must be in one etcd"), "{error}");
    }

    #[test]
    fn etcd_files_fit_the_servers() {
        let file = || Some(PathBuf::from("/f"));
        let of = |server: &str, (ca_file, certificate, key)| {
            let servers = server.split(',').filter(|one| !one.is_empty()).map(str::to_owned).collect();
            etcd(servers, "/p".to_owned(), ca_file, certificate, key)
        };
        assert_eq!(of("", (None, None, None)).unwrap().map(|etcd| etcd.prefix), None);
        assert!(of("http://a:1,https://b:2", (file(), file(), file())).unwrap().is_some());
        assert!(of("http://a:1", (None, None, None)).unwrap().is_some());
        for (server, files) in [
            ("", (file(), None, None)),
            ("a:1", (None, None, None)),
            ("https://a:1", (None, None, None)),
            ("https://a:1", (file(), file(), None)),
        ] {
            assert!(of(server, files).is_err(), "{server}");
        }
        let error = of("http://a:1,http://root:secret@b:1", (None, None, None)).unwrap_err().to_string();
        assert!(error.contains("must not contain a user") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn an_interval_of_compactions_is_zero_or_ten_seconds() {
        let of = |seconds| compaction_interval(Duration::from_secs(seconds)).ok();
        assert_eq!(of(0), Some(None));
        assert_eq!((of(9), of(10)), (None, Some(Some(Duration::from_secs(10)))));
    }
}
