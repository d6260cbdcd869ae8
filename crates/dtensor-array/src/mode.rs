//! Scoped modes of the calling thread, and listeners.
//!
//! A mode is a value per thread that holds for the length of a scope, such as "do not record gradients". [`mode!`](macro@crate::mode)
//! declares one. Every mode is part of a [`Snapshot`], so that work which is done later, or on another thread, is done in the
//! modes in which it was asked for.
//!
//! Listeners ([`listeners!`](crate::listeners)) are told of events for the length of a scope. They hear what happens while they
//! listen, whoever asked for it, and so are no part of a snapshot.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::LocalKey;

use parking_lot::Mutex;

/// Declares a mode: a value per thread, with the one it has outside of all scopes.
///
/// ```
/// dtensor_array::mode! {
///     /// Whether to be brief.
///     static BRIEF: Cell<bool> = false;
/// }
/// assert!(BRIEF.within(true, || BRIEF.get()));
/// assert!(!BRIEF.get());
/// ```
///
/// The value is in a `Cell` if it is `Copy`, else in a `RefCell`.
#[macro_export]
macro_rules! mode {
    ($($(#[$doc:meta])* $vis:vis static $name:ident: $slot:ident<$type:ty> = $value:expr;)*) => {$(
        $(#[$doc])*
        $vis static $name: $crate::mode::Mode<std::cell::$slot<$type>> = {
            std::thread_local! {
                static VALUE: std::cell::$slot<$type> = const { std::cell::$slot::new($value) };
            }
            $crate::mode::Mode::new(&VALUE, || $value)
        };
    )*};
}

/// The place of a mode's value on one thread: a `Cell` or a `RefCell`.
pub trait Slot: 'static {
    /// What it holds.
    type Value: Clone + Send + Sync + 'static;
    #[doc(hidden)]
    fn read(&self) -> Self::Value;
    #[doc(hidden)]
    fn replace(&self, value: Self::Value) -> Self::Value;
}

impl<T: Copy + Send + Sync + 'static> Slot for Cell<T> {
    type Value = T;
    #[inline]
    fn read(&self) -> T {
        self.get()
    }
    #[inline]
    fn replace(&self, value: T) -> T {
        Cell::replace(self, value)
    }
}

impl<T: Clone + Send + Sync + 'static> Slot for RefCell<T> {
    type Value = T;
    #[inline]
    fn read(&self) -> T {
        self.borrow().clone()
    }
    #[inline]
    fn replace(&self, value: T) -> T {
        RefCell::replace(self, value)
    }
}

/// A mode, declared by [`mode!`](macro@crate::mode).
pub struct Mode<S: Slot> {
    slot: &'static LocalKey<S>,
    /// The value outside of all scopes.
    outside: fn() -> S::Value,
    /// Whether it is in the registry. A mode that has never been set has its outside value everywhere.
    registered: AtomicBool,
}

impl<S: Slot> Mode<S> {
    #[doc(hidden)]
    #[inline]
    pub const fn new(slot: &'static LocalKey<S>, outside: fn() -> S::Value) -> Self {
        Mode { slot, outside, registered: AtomicBool::new(false) }
    }

    /// Returns the value on this thread.
    #[inline]
    pub fn get(&'static self) -> S::Value {
        self.slot.with(S::read)
    }

    /// Looks at the value on this thread without copying it.
    #[inline]
    pub fn with<R>(&'static self, look: impl FnOnce(&S) -> R) -> R {
        self.register();
        self.slot.with(look)
    }

    /// Sets the value on this thread, until the scope around ends.
    #[inline]
    pub fn set(&'static self, value: S::Value) {
        drop(self.replace(value));
    }

    /// Sets the value on this thread and returns the one before.
    #[inline]
    pub fn replace(&'static self, value: S::Value) -> S::Value {
        self.register();
        self.slot.with(|slot| slot.replace(value))
    }

    /// Runs `body` with the value set, and restores the one before, even if `body` panics.
    #[inline]
    pub fn within<R>(&'static self, value: S::Value, body: impl FnOnce() -> R) -> R {
        let _scope = self.enter(value);
        body()
    }

    /// Sets the value until the returned guard is dropped.
    #[inline]
    pub fn enter(&'static self, value: S::Value) -> Scope<S> {
        Scope { mode: self, before: Some(self.replace(value)) }
    }

    #[inline]
    fn register(&'static self) {
        if !self.registered.load(Ordering::Relaxed) {
            self.register_now();
        }
    }

    #[cold]
    fn register_now(&'static self) {
        let mut registry = REGISTRY.lock();
        if !self.registered.swap(true, Ordering::Relaxed) {
            registry.push(self);
        }
    }
}

impl<S: Slot> std::fmt::Debug for Mode<S> {
    #[inline]
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mode")
    }
}

/// Restores the value that a mode had before, when dropped.
#[derive(Debug)]
#[must_use = "the mode is left when this is dropped"]
pub struct Scope<S: Slot> {
    mode: &'static Mode<S>,
    before: Option<S::Value>,
}

impl<S: Slot> Drop for Scope<S> {
    #[inline]
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            // Dropped outside of the slot: the value may be the last handle to something that reads modes.
            drop(self.mode.slot.with(|slot| slot.replace(before)));
        }
    }
}

/// All modes that have ever been set, on any thread.
static REGISTRY: Mutex<Vec<&'static dyn Registered>> = Mutex::new(Vec::new());

trait Registered: Send + Sync {
    fn save(&'static self) -> Box<dyn Any + Send + Sync>;
    /// Sets a saved value, or that outside of all scopes, until the guard is dropped.
    fn restore(&'static self, saved: Option<&(dyn Any + Send + Sync)>) -> Box<dyn Any>;
}

impl<S: Slot> Registered for Mode<S> {
    #[inline]
    fn save(&'static self) -> Box<dyn Any + Send + Sync> {
        Box::new(self.get())
    }

    #[inline]
    fn restore(&'static self, saved: Option<&(dyn Any + Send + Sync)>) -> Box<dyn Any> {
        let saved = saved.and_then(|saved| saved.downcast_ref::<S::Value>()).cloned();
        Box::new(self.enter(saved.unwrap_or_else(self.outside)))
    }
}

/// The values of all modes of one thread at one moment.
///
/// ```
/// use dtensor_array::mode::Snapshot;
/// dtensor_array::mode! {
///     static LOUD: Cell<bool> = false;
/// }
/// let outside = Snapshot::now();
/// let inside = LOUD.within(true, Snapshot::now);
/// assert!(inside.within(|| LOUD.get()));
/// assert!(!LOUD.within(true, || outside.within(|| LOUD.get())));
/// ```
pub struct Snapshot(Vec<Box<dyn Any + Send + Sync>>);

impl Snapshot {
    /// Takes the values of the calling thread.
    #[inline]
    pub fn now() -> Self {
        let modes = REGISTRY.lock().clone();
        Snapshot(modes.iter().map(|mode| mode.save()).collect())
    }

    /// Runs `body` with these values, on this or another thread, and restores those before, even if `body` panics.
    #[inline]
    pub fn within<R>(&self, body: impl FnOnce() -> R) -> R {
        // Modes that were first set after this was taken had their outside value then.
        let modes = REGISTRY.lock().clone();
        let saved = self.0.iter().map(|value| Some(&**value)).chain(std::iter::repeat(None));
        let _scopes: Vec<_> = modes.iter().zip(saved).map(|(mode, saved)| mode.restore(saved)).collect();
        body()
    }
}

impl std::fmt::Debug for Snapshot {
    #[inline]
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Snapshot of {} modes", self.0.len())
    }
}

/// Declares a list of listeners, by their type.
///
/// ```
/// use std::rc::Rc;
/// dtensor_array::listeners! {
///     /// Told of every number.
///     static NUMBERS: dyn Fn(&i32);
/// }
/// let sum = Rc::new(std::cell::Cell::new(0));
/// let heard = sum.clone();
/// NUMBERS.listen(Rc::new(move |n| heard.set(heard.get() + n)), || NUMBERS.tell(&2));
/// NUMBERS.tell(&3);
/// assert_eq!(sum.get(), 2);
/// ```
#[macro_export]
macro_rules! listeners {
    ($($(#[$doc:meta])* $vis:vis static $name:ident: $listener:ty;)*) => {$(
        $(#[$doc])*
        $vis static $name: $crate::mode::Listeners<$listener> = {
            std::thread_local! {
                static ANY: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
                static LIST: $crate::mode::ListenerList<$listener> =
                    const { std::cell::RefCell::new(Vec::new()) };
            }
            $crate::mode::Listeners::new(&ANY, &LIST)
        };
    )*};
}

#[doc(hidden)]
pub type ListenerList<F> = RefCell<Vec<Rc<F>>>;

/// The listeners of one type of event on the calling thread, declared by [`listeners!`](crate::listeners).
pub struct Listeners<F: ?Sized + 'static> {
    /// Whether there is any: read where an event happens, so that an event that nobody hears costs one load.
    any: &'static LocalKey<Cell<bool>>,
    list: &'static LocalKey<ListenerList<F>>,
}

impl<F: ?Sized> Listeners<F> {
    #[doc(hidden)]
    #[inline]
    pub const fn new(any: &'static LocalKey<Cell<bool>>, list: &'static LocalKey<ListenerList<F>>) -> Self {
        Listeners { any, list }
    }

    /// Returns true if anyone listens on this thread.
    #[inline]
    pub fn any(&self) -> bool {
        self.any.get()
    }

    /// Runs `body`, in which the listener is told of events on this thread.
    pub fn listen<R>(&'static self, listener: Rc<F>, body: impl FnOnce() -> R) -> R {
        struct Leave<F: ?Sized + 'static>(&'static Listeners<F>);
        impl<F: ?Sized> Drop for Leave<F> {
            #[inline]
            fn drop(&mut self) {
                let left = self.0.list.with_borrow_mut(|list| (list.pop(), list.is_empty()));
                self.0.any.set(!left.1);
            }
        }
        self.list.with_borrow_mut(|list| list.push(listener));
        self.any.set(true);
        let _leave = Leave(self);
        body()
    }

    /// Calls `tell` with each listener. A listener may itself listen, or cause further events.
    #[cold]
    pub fn each(&self, tell: impl FnMut(&Rc<F>)) {
        self.list.with_borrow(Clone::clone).iter().for_each(tell);
    }
}

impl<E: ?Sized> Listeners<dyn Fn(&E)> {
    /// Tells all listeners of an event.
    #[inline]
    pub fn tell(&self, event: &E) {
        if self.any() {
            self.each(|listener| listener(event));
        }
    }
}

impl<F: ?Sized> std::fmt::Debug for Listeners<F> {
    #[inline]
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Listeners")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    mode! {
        static NUMBER: Cell<u32> = 1;
        static TEXT: RefCell<Option<String>> = None;
    }

    #[test]
    fn scopes_nest_and_end_with_a_panic() {
        NUMBER.within(2, || {
            NUMBER.within(3, || assert_eq!(NUMBER.get(), 3));
            assert_eq!(NUMBER.get(), 2);
            let _ = std::panic::catch_unwind(|| NUMBER.within(4, || panic!("out")));
            assert_eq!(NUMBER.get(), 2);
        });
        assert_eq!(NUMBER.get(), 1);
    }

    #[test]
    fn a_snapshot_holds_all_modes_on_any_thread() {
        let outside = Snapshot::now();
        let inside = NUMBER.within(7, || TEXT.within(Some("seven".into()), Snapshot::now));
        let seen = || (NUMBER.get(), TEXT.get());
        let there = std::thread::scope(|scope| scope.spawn(|| inside.within(seen)).join().unwrap());
        assert_eq!(there, (7, Some("seven".into())));
        assert_eq!(seen(), (1, None));
        // What was set only later was at its outside value when the snapshot was taken.
        mode! {
            static LATE: Cell<bool> = false;
        }
        LATE.within(true, || {
            NUMBER.within(9, || outside.within(|| assert_eq!((LATE.get(), seen()), (false, (1, None)))))
        });
    }
}
