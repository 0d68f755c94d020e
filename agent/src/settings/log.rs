//! Settings of the log.

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

use super::log_line;
use super::table::settings;
use super::value::{Single, choices};
use crate::terminal;

settings! {
    /// Settings of the log.
    pub(crate) struct LogSettings = "";

    /// Events to log: error, warn, info, debug, trace, or a filter such as info,coracle_cri=debug.
    log_level: Option<Filter> = unset "info; warn for commands that end, such as image and down", "LEVEL";
    /// Format of the log: text or json.
    log_format: Format = default "text", "FORMAT";
}

/// A level or a filter of tracing.
#[derive(Debug, Clone)]
pub(crate) struct Filter(String);

/// The level if none is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DefaultLevel {
    /// `info`, for programs that run until they are stopped.
    Server,
    /// `warn`, for commands that end: they print their results.
    Command,
}

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
    pub(crate) fn start(&self, default: DefaultLevel) {
        let level = self.log_level.as_ref().map_or(default.name(), |filter| &filter.0);
        let log = tracing_subscriber::fmt().with_env_filter(EnvFilter::new(directives(level)));
        let log = log.with_writer(|| log_line::LogLine);
        match self.log_format {
            Format::Text => {
                log.with_target(false).with_ansi(terminal::has_escapes(&std::io::stderr())).init()
            }
            Format::Json => log.json().init(),
        }
    }
}

// === impl DefaultLevel ===

impl DefaultLevel {
    fn name(self) -> &'static str {
        match self {
            Self::Server => "info",
            Self::Command => "warn",
        }
    }
}

// === impl Filter ===

impl Single for Filter {
    fn parse(text: &str) -> Result<Self, String> {
        match EnvFilter::try_new(directives(text)) {
            Ok(_) => Ok(Self(text.to_owned())),
            Err(error) => Err(format!("expected a level or a filter: {error}")),
        }
    }
}

/// Adds directives that drop unwanted events of libraries. `debug` and `trace` keep all events.
///
/// The API client logs each failed request, which its callers log as well. It also warns of each server whose
/// certificate it does not verify. A joining machine verifies the cluster by the hash of its CA, so this warning would
/// be wrong.
///
/// The HTTP/2 library warns of invalid frames. Any client can send them, without credentials and as fast as it likes.
fn directives(level: &str) -> String {
    match level {
        "error" | "warn" | "info" => format!("{level},h2=error,kube_client::client=off"),
        "" | "off" | "debug" | "trace" => level.to_owned(),
        // A later directive for the same target replaces the first one.
        _ => format!("h2=error,{level}"),
    }
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    /// Whether the log has warnings of the HTTP/2 library, and of this program.
    fn warnings(level: &str) -> [bool; 2] {
        let log = tracing_subscriber::fmt().with_env_filter(EnvFilter::new(directives(level))).finish();
        tracing::subscriber::with_default(log, || {
            [
                tracing::enabled!(target: "h2::proto::ping_pong", Level::WARN),
                tracing::enabled!(target: "coracle_agent", Level::WARN),
            ]
        })
    }

    #[test]
    fn clients_do_not_fill_the_log_with_warnings_of_the_http2_library() {
        for level in ["warn", "info", "INFO", "info,coracle_cri=debug"] {
            assert_eq!(warnings(level), [false, true], "{level}");
        }
        assert_eq!(warnings("debug"), [true; 2]);
        assert_eq!(warnings("info,h2=debug"), [true; 2]);
        assert_eq!(warnings("off"), [false; 2]);
    }
}
