//! Settings of the log.

use clap::ValueEnum;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

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

/// The level if no level is set.
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
        // The setting was parsed when it was read, so it is valid.
        let targets = targets(&directives(level)).unwrap_or_default();
        let log = tracing_subscriber::fmt::layer().with_writer(|| log_line::LogLine);
        match self.log_format {
            Format::Text => {
                let log = log.with_target(false).with_ansi(terminal::has_escapes(&std::io::stderr()));
                tracing_subscriber::registry().with(log).with(targets).init();
            }
            Format::Json => tracing_subscriber::registry().with(log.json()).with(targets).init(),
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
        match targets(&directives(text)) {
            Ok(_) => Ok(Self(text.to_owned())),
            Err(error) => Err(format!("expected a level or a filter: {error}")),
        }
    }
}

/// Adds directives that drop unwanted events of libraries. `debug` and `trace` keep all events.
///
/// The API client logs each failed request, which its callers log as well. The client also warns of each server whose
/// certificate it does not verify. A joining machine verifies the cluster by the hash of its CA, so this warning would
/// be wrong.
///
/// The HTTP/2 library warns of invalid frames. Any client can send invalid frames without credentials and at any rate.
fn directives(level: &str) -> String {
    match level {
        "error" | "warn" | "info" => format!("{level},h2=error,kube_client::client=off"),
        "" | "off" | "debug" | "trace" => level.to_owned(),
        // A later directive for the same target replaces the first directive.
        _ => format!("h2=error,{level}"),
    }
}

/// Reads directives that are separated by commas: a level, a target with a level, or a target with all its events. The
/// syntax is that of `EnvFilter`, which also selects events by spans and fields. `EnvFilter` would add an engine of
/// regular expressions to the program, and this program has no spans.
fn targets(directives: &str) -> Result<Targets, String> {
    let given: Vec<&str> = directives.split(',').filter(|directive| !directive.is_empty()).collect();
    if given.is_empty() {
        return Ok(Targets::new().with_default(LevelFilter::ERROR));
    }
    given.into_iter().map(str::trim).try_fold(Targets::new(), with_directive)
}

fn with_directive(targets: Targets, directive: &str) -> Result<Targets, String> {
    let (target, level) = directive.split_once('=').unwrap_or((directive, ""));
    if !is_target(target) {
        return Err("invalid filter directive".to_owned());
    }
    if let (true, Ok(level)) = (target == directive, target.parse::<LevelFilter>()) {
        return Ok(targets.with_default(level));
    }
    // A target without a level has all its events.
    let level = if level.is_empty() { Ok(LevelFilter::TRACE) } else { level.parse::<LevelFilter>() };
    Ok(targets.with_target(target, level.map_err(|error| error.to_string())?))
}

/// Whether a text can be the beginning of a target. Brackets would select spans.
fn is_target(text: &str) -> bool {
    let begins = text.starts_with(|c: char| c.is_alphanumeric() || matches!(c, '-' | ':' | '_'));
    begins && !text.contains(['[', ']', '{', '}'])
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    /// Whether the log has warnings of the HTTP/2 library, and of this program.
    fn warnings(level: &str) -> [bool; 2] {
        let targets = targets(&directives(level)).unwrap();
        let log = tracing_subscriber::registry().with(tracing_subscriber::fmt::layer()).with(targets);
        tracing::subscriber::with_default(log, || {
            [
                tracing::enabled!(target: "h2::proto::ping_pong", Level::WARN),
                tracing::enabled!(target: "coracle_agent", Level::WARN),
            ]
        })
    }

    /// The most verbose level of a target that is logged.
    fn level_of(filter: &str, target: &str) -> Option<Level> {
        let targets = targets(filter).unwrap();
        let all = [Level::TRACE, Level::DEBUG, Level::INFO, Level::WARN, Level::ERROR];
        all.into_iter().find(|level| targets.would_enable(target, level))
    }

    #[test]
    fn the_longest_target_decides() {
        for (filter, target, level) in [
            ("info", "a", Some(Level::INFO)),
            ("INFO", "a", Some(Level::INFO)),
            ("4", "a", Some(Level::DEBUG)),
            ("info,a=debug", "a::b", Some(Level::DEBUG)),
            ("a=debug,info", "a::b", Some(Level::DEBUG)),
            ("info,a=debug,a::b=off", "a::b::c", None),
            ("info,a=debug,a::b=off", "a::c", Some(Level::DEBUG)),
            ("a=debug", "b", None),
            ("a", "a::b", Some(Level::TRACE)),
            ("a=", "a", Some(Level::TRACE)),
            (" info , a=warn ,,", "a", Some(Level::WARN)),
            ("info,,", "b", Some(Level::INFO)),
            ("a=debug,a=warn", "a", Some(Level::WARN)),
            ("", "a", Some(Level::ERROR)),
            (",", "a", Some(Level::ERROR)),
            ("off", "a", None),
        ] {
            assert_eq!(level_of(filter, target), level, "{filter:?} {target}");
        }
    }

    #[test]
    fn invalid_filters_are_refused() {
        let error = |filter: &str| Filter::parse(filter).unwrap_err();
        for filter in [
            "=info",
            "info,=info",
            "a[span]=info",
            "[span]",
            "a[{field=1}]=info",
            "?",
            "info,{a}",
            " ",
            "info, ",
        ] {
            assert_eq!(error(filter), "expected a level or a filter: invalid filter directive", "{filter}");
        }
        for filter in ["a=loud", "info,a=b=c", "a=6"] {
            let expected = "expected a level or a filter: error parsing level filter: expected one of";
            assert!(error(filter).starts_with(expected), "{filter}: {}", error(filter));
        }
    }

    #[test]
    fn events_below_all_levels_are_disabled_globally() {
        let targets = targets("warn,a=info").unwrap();
        let log = tracing_subscriber::registry().with(tracing_subscriber::fmt::layer()).with(targets);
        assert_eq!(tracing::Subscriber::max_level_hint(&log), Some(LevelFilter::INFO));
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
