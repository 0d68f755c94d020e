//! The settings of audit events.

use std::{num::NonZero, time::Duration};

use coracle_controlplane::{
    AuditBatch, AuditConfig, AuditLogOptions, AuditMode as Mode, AuditThrottle, AuditTruncateConfig,
    AuditWebhookConfig,
};

use super::super::audit_mode::AuditMode;
use super::super::value::Fraction;
use super::{ControlPlaneSettings, count};

impl ControlPlaneSettings {
    /// The configuration of audit events. `None` without a policy and a backend.
    pub(super) fn audit(&self) -> anyhow::Result<Option<AuditConfig>> {
        let log = self.audit_log_path.clone().map(|path| AuditLogOptions {
            path,
            max_bytes: u64::from(self.audit_log_maxsize.get()) << 20,
            max_backups: usize::try_from(self.audit_log_maxbackup).unwrap_or(usize::MAX),
            max_age: Duration::from_secs(u64::from(self.audit_log_maxage) * 24 * 3600),
        });
        let log_truncate = match &log {
            Some(_) => self.log_truncate()?,
            None => None,
        };
        let webhook_truncate = match &self.audit_webhook_config_file {
            Some(_) => self.webhook_truncate()?,
            None => None,
        };
        let (log_batch, webhook_batch) = (self.log_batch()?, self.webhook_batch()?);
        let webhook = self.audit_webhook_config_file.clone().map(|file| AuditWebhookConfig {
            file,
            mode: mode(self.audit_webhook_mode),
            batch: webhook_batch,
            truncate: webhook_truncate,
            backoff: self.audit_webhook_initial_backoff.map(|backoff| backoff.0),
        });
        let log_mode = mode(self.audit_log_mode);
        match (self.audit_policy_file.clone(), log.is_some(), webhook.is_some()) {
            (Some(_), false, false) => {
                anyhow::bail!("audit-policy-file needs audit-log-path or audit-webhook-config-file")
            }
            (Some(policy_file), ..) => {
                Ok(Some(AuditConfig { policy_file, log, log_mode, log_batch, log_truncate, webhook }))
            }
            (None, false, false) => Ok(None),
            (None, true, _) => anyhow::bail!("audit-log-path needs audit-policy-file"),
            (None, false, true) => anyhow::bail!("audit-webhook-config-file needs audit-policy-file"),
        }
    }

    fn log_truncate(&self) -> anyhow::Result<Option<AuditTruncateConfig>> {
        let event = self.audit_log_truncate_max_event_size;
        let batch = self.audit_log_truncate_max_batch_size;
        truncate("log", self.audit_log_truncate_enabled, event, batch)
    }

    fn log_batch(&self) -> anyhow::Result<AuditBatch> {
        let is_used = self.audit_log_path.is_some()
            && matches!(self.audit_log_mode, AuditMode::Batch)
            && self.audit_log_batch_throttle_enable;
        let (per_second, burst) = (self.audit_log_batch_throttle_qps, self.audit_log_batch_throttle_burst);
        Ok(AuditBatch {
            buffer: count(self.audit_log_batch_buffer_size),
            size: count(self.audit_log_batch_max_size),
            wait: self.audit_log_batch_max_wait.0,
            throttle: is_used.then(|| throttle("log", per_second, burst)).transpose()?,
        })
    }

    fn webhook_batch(&self) -> anyhow::Result<AuditBatch> {
        let is_used = self.audit_webhook_config_file.is_some()
            && matches!(self.audit_webhook_mode, AuditMode::Batch)
            && self.audit_webhook_batch_throttle_enable;
        let burst = self.audit_webhook_batch_throttle_burst.get();
        let per_second = self.audit_webhook_batch_throttle_qps;
        Ok(AuditBatch {
            buffer: count(self.audit_webhook_batch_buffer_size),
            size: count(self.audit_webhook_batch_max_size),
            wait: self.audit_webhook_batch_max_wait.0,
            throttle: is_used.then(|| throttle("webhook", per_second, burst)).transpose()?,
        })
    }

    fn webhook_truncate(&self) -> anyhow::Result<Option<AuditTruncateConfig>> {
        let event = self.audit_webhook_truncate_max_event_size;
        let batch = self.audit_webhook_truncate_max_batch_size;
        truncate("webhook", self.audit_webhook_truncate_enabled, event, batch)
    }
}

/// The rate of batches. As upstream, it is only checked if it is in use.
fn throttle(backend: &str, per_second: Fraction, burst: u32) -> anyhow::Result<AuditThrottle> {
    let Fraction(per_second) = per_second;
    anyhow::ensure!(per_second > 0.0, "audit-{backend}-batch-throttle-qps {per_second} must be more than 0");
    anyhow::ensure!(burst > 0, "audit-{backend}-batch-throttle-burst must be more than 0");
    Ok(AuditThrottle { per_second, burst })
}

/// The limits of a backend. As upstream, the sizes are also checked if the limits are not enabled.
fn truncate(
    backend: &str,
    is_enabled: bool,
    event: NonZero<u32>,
    batch: NonZero<u32>,
) -> anyhow::Result<Option<AuditTruncateConfig>> {
    anyhow::ensure!(
        event <= batch,
        "audit-{backend}-truncate-max-batch-size {batch} must be at least audit-{backend}-truncate-max-event-size {event}"
    );
    let config = AuditTruncateConfig { max_event_bytes: count(event), max_batch_bytes: count(batch) };
    Ok(is_enabled.then_some(config))
}

fn mode(mode: AuditMode) -> Mode {
    match mode {
        AuditMode::Batch => Mode::Batch,
        AuditMode::Blocking => Mode::Blocking,
        AuditMode::BlockingStrict => Mode::BlockingStrict,
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::super::super::sources::Sources;
    use super::super::super::table::Flags;
    use super::*;

    fn of(words: &[&str]) -> anyhow::Result<Option<AuditConfig>> {
        let command = Flags::<ControlPlaneSettings>::augment_args(clap::Command::new("x"));
        let matches = command.try_get_matches_from([&["x"][..], words].concat()).unwrap();
        let flags = Flags::<ControlPlaneSettings>::from_arg_matches(&matches).unwrap();
        flags.resolve(&mut Sources::default()).unwrap().audit()
    }

    #[test]
    fn the_modes_have_upstreams_names_and_defaults() {
        let both =
            ["--audit-policy-file", "/p", "--audit-log-path", "/l", "--audit-webhook-config-file", "/w"];
        let modes = |words: &[&str]| {
            let config = of(&[&both[..], words].concat()).unwrap().unwrap();
            (config.log_mode, config.webhook.unwrap().mode)
        };
        assert_eq!(modes(&[]), (Mode::Blocking, Mode::Batch));
        let set = ["--audit-log-mode", "blocking-strict", "--audit-webhook-mode", "blocking"];
        assert_eq!(modes(&set), (Mode::BlockingStrict, Mode::Blocking));
        assert_eq!(modes(&["--audit-log-mode", "batch"]).0, Mode::Batch);
        let backoff = |words: &[&str]| {
            let config = of(&[&both[..], words].concat()).unwrap().unwrap();
            config.webhook.unwrap().backoff
        };
        assert_eq!(backoff(&[]), None);
        assert_eq!(backoff(&["--audit-webhook-initial-backoff", "2s"]), Some(Duration::from_secs(2)));
        assert!(of(&["--audit-log-path", "/l"]).is_err(), "no policy");
        assert!(of(&[]).unwrap().is_none());
    }

    #[test]
    fn the_rate_of_batches_has_upstreams_names_and_defaults() {
        let of = |words: &[&str]| {
            let with_webhook = ["--audit-policy-file", "/p", "--audit-webhook-config-file", "/w"];
            of(&[&with_webhook[..], words].concat())
                .map(|config| config.unwrap().webhook.unwrap().batch.throttle)
        };
        assert_eq!(of(&[]).unwrap(), Some(AuditThrottle { per_second: 10.0, burst: 15 }));
        let set = ["--audit-webhook-batch-throttle-qps", "0.5", "--audit-webhook-batch-throttle-burst", "1"];
        assert_eq!(of(&set).unwrap(), Some(AuditThrottle { per_second: 0.5, burst: 1 }));
        assert_eq!(of(&["--audit-webhook-batch-throttle-enable=false"]).unwrap(), None);
        let zero = ["--audit-webhook-batch-throttle-qps", "0"];
        assert!(of(&zero).is_err());
        assert_eq!(of(&[&zero[..], &["--audit-webhook-mode", "blocking"]].concat()).unwrap(), None);
    }

    #[test]
    fn batches_of_the_log_have_upstreams_names_and_defaults() {
        let with_log = ["--audit-policy-file", "/p", "--audit-log-path", "/l"];
        let log =
            |words: &[&str]| of(&[&with_log[..], words].concat()).map(|config| config.unwrap().log_batch);
        let batch = |words: &[&str]| log(&[&["--audit-log-mode", "batch"][..], words].concat());
        assert_eq!(batch(&[]).unwrap(), AuditBatch::default());
        let set = "--audit-log-batch-buffer-size 7 --audit-log-batch-max-size 3 --audit-log-batch-max-wait 2s \
                   --audit-log-batch-throttle-enable --audit-log-batch-throttle-qps 0.5 \
                   --audit-log-batch-throttle-burst 4";
        let throttle = Some(AuditThrottle { per_second: 0.5, burst: 4 });
        let expected = AuditBatch { buffer: 7, size: 3, wait: Duration::from_secs(2), throttle };
        assert_eq!(batch(&set.split_whitespace().collect::<Vec<_>>()).unwrap(), expected);
        let without_rate = ["--audit-log-batch-throttle-enable"];
        assert!(batch(&without_rate).is_err());
        assert_eq!(log(&without_rate).unwrap(), AuditBatch::default(), "the mode is blocking");
    }

    #[test]
    fn the_limits_have_upstreams_names_and_defaults() {
        let with_log = ["--audit-policy-file", "/p", "--audit-log-path", "/l"];
        let with_webhook = ["--audit-policy-file", "/p", "--audit-webhook-config-file", "/w"];
        let log =
            |words: &[&str]| of(&[&with_log[..], words].concat()).map(|config| config.unwrap().log_truncate);
        let webhook = |words: &[&str]| {
            of(&[&with_webhook[..], words].concat()).map(|config| config.unwrap().webhook.unwrap().truncate)
        };
        assert_eq!((log(&[]).unwrap(), webhook(&[]).unwrap()), (None, None));
        let default = AuditTruncateConfig { max_event_bytes: 102_400, max_batch_bytes: 10_485_760 };
        assert_eq!(log(&["--audit-log-truncate-enabled"]).unwrap(), Some(default));
        assert_eq!(webhook(&["--audit-webhook-truncate-enabled"]).unwrap(), Some(default));
        let large = ["--audit-webhook-truncate-max-event-size", "20000000"];
        assert!(webhook(&large).is_err(), "the batch is smaller than an event");
        assert!(log(&large).is_ok(), "there is no webhook");
        let sizes = [&large[..], &["--audit-webhook-truncate-max-batch-size", "30000000"]].concat();
        assert_eq!(webhook(&sizes).unwrap(), None);
    }
}
