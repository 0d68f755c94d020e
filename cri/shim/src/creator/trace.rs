//! Forwards the container library's error logs to the shim. The library returns errors such as "failed to prepare
//! rootfs", and writes the cause only to its log.

use std::fmt::{Debug, Write as _};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::report::{Message, Reporter};

/// A tracing subscriber that reports each error event.
struct Causes {
    reporter: Reporter,
}

/// An event in one line: its message and its error fields.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

/// Installs the subscriber for this process and its forks.
pub(super) fn install(reporter: Reporter) {
    // The shim itself uses no tracing, so no subscriber is installed yet.
    let _ = tracing::subscriber::set_global_default(Causes { reporter });
}

impl Subscriber for Causes {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::ERROR
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        self.reporter.send(&Message::Cause(format!("{}{}", line.message, line.fields)));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            name => drop(write!(self.fields, " ({name}: {value:?})")),
        }
    }
}
