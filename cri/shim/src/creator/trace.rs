//! The causes that the container library keeps to its log: it returns "failed to prepare rootfs"
//! and logs why. Its errors go to the shim.

use std::fmt::{Debug, Write as _};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::report::{Speaker, Word};

/// Says every error event.
struct Causes {
    speaker: Speaker,
}

/// An event in one line: its message, and of its fields what is an error.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

/// For this process and its further forks.
pub(super) fn install(speaker: Speaker) {
    // There was none before: the shim logs nothing through tracing.
    let _ = tracing::subscriber::set_global_default(Causes { speaker });
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
        self.speaker.say(&Word::Cause(format!("{}{}", line.message, line.fields)));
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
