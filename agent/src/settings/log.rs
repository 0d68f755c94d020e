//! Settings of the log.

use std::io::IsTerminal;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

use super::log_line;
use super::table::settings;
use super::value::{Single, choices};

settings! {
    /// Settings of the log.
    pub(crate) struct LogSettings = "";

    /// Events to log: error, warn, info, debug, trace, or a filter such as info,coracle_cri=debug.
    log_level: Filter = default "info", "LEVEL";
    /// Format of the log: text or json.
    log_format: Format = default "text", "FORMAT";
}

/// A level or a filter of tracing.
#[derive(Debug, Clone)]
pub(crate) struct Filter(String);

/// Format of the log.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Format {
    Text,
    Json,
}

choices!(Format);

// === impl LogSettings ===

impl LogSettings {
    /// Sends the log to standard error from now on.
    pub(crate) fn start(&self) {
        let log = tracing_subscriber::fmt().with_env_filter(self.log_level.filter());
        let log = log.with_writer(|| log_line::LogLine);
        match self.log_format {
            Format::Text => log.with_target(false).with_ansi(std::io::stderr().is_terminal()).init(),
            Format::Json => log.json().init(),
        }
    }
}

// === impl Filter ===

impl Filter {
    fn filter(&self) -> EnvFilter {
        EnvFilter::new(directives(&self.0))
    }
}

impl Single for Filter {
    fn parse(text: &str) -> Result<Self, String> {
        match EnvFilter::try_new(directives(text)) {
            Ok(_) => Ok(Self(text.to_owned())),
            Err(error) => Err(format!("expected a level or a filter: {error}")),
        }
    }
}

/// The API client logs each failed request, which its callers log as well, and each server whose certificate it does not
/// verify. A machine that joins verifies the cluster by the hash of its CA instead, so this warning would be wrong.
fn directives(level: &str) -> String {
    match level {
        "error" | "warn" | "info" => format!("{level},kube_client::client=off"),
        _ => level.to_owned(),
    }
}
