//! Collects the warnings that the library emits through `tracing`.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Collects the messages of warnings.
struct Keeper(Arc<Mutex<Vec<String>>>);

/// The message of one warning.
#[derive(Default)]
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            write!(self.0, "{value:?}").expect("a string can be written to");
        }
    }
}

impl Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Runs `body` and returns its result with the warnings that this thread emits meanwhile.
pub fn warnings<R>(body: impl FnOnce() -> R) -> (R, Vec<String>) {
    let kept = Arc::default();
    let result = tracing::subscriber::with_default(Keeper(Arc::clone(&kept)), body);
    let kept = kept.lock().unwrap().clone();
    (result, kept)
}
