//! Scoped modes of the calling thread, and listeners.
//!
//! A mode is a thread-local value that is set for the length of a scope, such as "do not record gradients".
//! [`mode!`](macro@crate::mode) declares one. A [`Snapshot`] saves all modes, so that work which runs later, or on another
//! thread, can run in the modes in which it was requested.
//!
//! Listeners ([`listeners!`](crate::listeners)) are callbacks that receive events for the length of a scope. They receive every
//! event on their thread, no matter which code caused it, so a snapshot does not include them.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::LocalKey;

use parking_lot::Mutex;

/// Declares a mode: a thread-local value, with its default outside of all scopes.
///
/// ```
/// dtensor_array::mode! {
///     /// Whether output is verbose.
///     static VERBOSE: Cell<bool> = false;
/// }
/// assert!(VERBOSE.within(true, || VERBOSE.get()));
/// assert!(!VERBOSE.get());
/// ```
///
/// Use `Cell` for a `Copy` type, and `RefCell` for any other.
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

/// A cell that stores a mode's value on one thread: a `Cell` or a `RefCell`.
pub trait Slot: 'static {
    /// The type of the value.
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
    /// Returns the value outside of all scopes.
    default: fn() -> S::Value,
    /// Whether the mode is in the registry. A mode that was never set has its default on every thread.
    registered: AtomicBool,
}

impl<S: Slot> Mode<S> {
    #[doc(hidden)]
    #[inline]
    pub const fn new(slot: &'static LocalKey<S>, default: fn() -> S::Value) -> Self {
        Mode { slot, default, registered: AtomicBool::new(false) }
    }

    /// Returns the value on this thread.
    #[inline]
    pub fn get(&'static self) -> S::Value {
        self.slot.with(S::read)
    }

    /// Calls `look` with the cell of this thread, without cloning the value.
    #[inline]
    pub fn with<R>(&'static self, look: impl FnOnce(&S) -> R) -> R {
        self.register();
        self.slot.with(look)
    }

    /// Sets the value on this thread until the enclosing scope ends.
    #[inline]
    pub fn set(&'static self, value: S::Value) {
        drop(self.replace(value));
    }

    /// Sets the value on this thread and returns the previous one.
    #[inline]
    pub fn replace(&'static self, value: S::Value) -> S::Value {
        self.register();
        self.slot.with(|slot| slot.replace(value))
    }

    /// Runs `body` with the value set, then restores the previous one, even if `body` panics.
    #[inline]
    pub fn within<R>(&'static self, value: S::Value, body: impl FnOnce() -> R) -> R {
        let _scope = self.enter(value);
        body()
    }

    /// Sets the value until the returned guard is dropped.
    #[inline]
    pub fn enter(&'static self, value: S::Value) -> Scope<S> {
        Scope { mode: self, previous: Some(self.replace(value)) }
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

/// A guard that restores the previous value of a mode when it is dropped.
#[derive(Debug)]
#[must_use = "the previous value is restored when this is dropped"]
pub struct Scope<S: Slot> {
    mode: &'static Mode<S>,
    previous: Option<S::Value>,
}

impl<S: Slot> Drop for Scope<S> {
    #[inline]
    fn drop(&mut self) {
        if let Some(previous) = self.previous.take() {
            // The old value is dropped after the cell is released, because its destructor may read modes.
            drop(self.mode.slot.with(|slot| slot.replace(previous)));
        }
    }
}

/// All modes that were ever set, on any thread.
static REGISTRY: Mutex<Vec<&'static dyn AnyMode>> = Mutex::new(Vec::new());

/// A mode of any type, as the registry stores it.
trait AnyMode: Send + Sync {
    /// Returns the value on this thread.
    fn save(&'static self) -> Box<dyn Any + Send + Sync>;
    /// Sets a saved value, or the default if there is none, until the returned guard is dropped.
    fn restore(&'static self, saved: Option<&(dyn Any + Send + Sync)>) -> Box<dyn Any>;
}

impl<S: Slot> AnyMode for Mode<S> {
    #[inline]
    fn save(&'static self) -> Box<dyn Any + Send + Sync> {
        Box::new(self.get())
    }

    #[inline]
    fn restore(&'static self, saved: Option<&(dyn Any + Send + Sync)>) -> Box<dyn Any> {
        let saved = saved.and_then(|saved| saved.downcast_ref::<S::Value>()).cloned();
        Box::new(self.enter(saved.unwrap_or_else(self.default)))
    }
}

/// The values of all modes on one thread at one moment.
///
/// ```
/// use dtensor_array::mode::Snapshot;
/// dtensor_array::mode! {
///     static VERBOSE: Cell<bool> = false;
/// }
/// let outside = Snapshot::now();
/// let inside = VERBOSE.within(true, Snapshot::now);
/// assert!(inside.within(|| VERBOSE.get()));
/// assert!(!VERBOSE.within(true, || outside.within(|| VERBOSE.get())));
/// ```
pub struct Snapshot(Vec<Box<dyn Any + Send + Sync>>);

impl Snapshot {
    /// Takes a snapshot of the calling thread.
    #[inline]
    pub fn now() -> Self {
        let modes = REGISTRY.lock().clone();
        Snapshot(modes.iter().map(|mode| mode.save()).collect())
    }

    /// Runs `body` with the saved values, on this or another thread, then restores the previous ones, even if `body` panics.
    #[inline]
    pub fn within<R>(&self, body: impl FnOnce() -> R) -> R {
        // A mode that was registered after this snapshot was taken had its default then. The registry only grows, so the
        // saved values belong to its first entries.
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

/// Declares a list of listeners of one type, for each thread.
///
/// ```
/// use std::rc::Rc;
/// dtensor_array::listeners! {
///     /// Receives every number.
///     static NUMBERS: dyn Fn(&i32);
/// }
/// let sum = Rc::new(std::cell::Cell::new(0));
/// let total = sum.clone();
/// NUMBERS.listen(Rc::new(move |n| total.set(total.get() + n)), || NUMBERS.notify(&2));
/// NUMBERS.notify(&3);
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
    /// Whether the list has an entry. An event without listeners costs only the load of this flag.
    any: &'static LocalKey<Cell<bool>>,
    list: &'static LocalKey<ListenerList<F>>,
}

impl<F: ?Sized> Listeners<F> {
    #[doc(hidden)]
    #[inline]
    pub const fn new(any: &'static LocalKey<Cell<bool>>, list: &'static LocalKey<ListenerList<F>>) -> Self {
        Listeners { any, list }
    }

    /// Returns true if there is a listener on this thread.
    #[inline]
    pub fn any(&self) -> bool {
        self.any.get()
    }

    /// Runs `body`, during which `listener` receives the events of this thread.
    pub fn listen<R>(&'static self, listener: Rc<F>, body: impl FnOnce() -> R) -> R {
        struct PopOnDrop<F: ?Sized + 'static>(&'static Listeners<F>);
        impl<F: ?Sized> Drop for PopOnDrop<F> {
            #[inline]
            fn drop(&mut self) {
                // The listener is dropped after the list is released, because its destructor may use the list.
                let (_listener, is_empty) = self.0.list.with_borrow_mut(|list| (list.pop(), list.is_empty()));
                self.0.any.set(!is_empty);
            }
        }
        self.list.with_borrow_mut(|list| list.push(listener));
        self.any.set(true);
        let _guard = PopOnDrop(self);
        body()
    }

    /// Calls `tell` with each listener. A listener may add listeners, or cause further events.
    #[cold]
    pub fn each(&self, tell: impl FnMut(&Rc<F>)) {
        self.list.with_borrow(Clone::clone).iter().for_each(tell);
    }
}

impl<E: ?Sized> Listeners<dyn Fn(&E)> {
    /// Calls all listeners with an event.
    #[inline]
    pub fn notify(&self, event: &E) {
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
    fn scopes_nest_and_end_on_a_panic() {
        NUMBER.within(2, || {
            NUMBER.within(3, || assert_eq!(NUMBER.get(), 3));
            assert_eq!(NUMBER.get(), 2);
            let _ = std::panic::catch_unwind(|| NUMBER.within(4, || panic!("out")));
            assert_eq!(NUMBER.get(), 2);
        });
        assert_eq!(NUMBER.get(), 1);
    }

    #[test]
    fn a_snapshot_restores_all_modes_on_any_thread() {
        let outside = Snapshot::now();
        let inside = NUMBER.within(7, || TEXT.within(Some("seven".into()), Snapshot::now));
        let seen = || (NUMBER.get(), TEXT.get());
        let on_other_thread = std::thread::scope(|scope| scope.spawn(|| inside.within(seen)).join().unwrap());
        assert_eq!(on_other_thread, (7, Some("seven".into())));
        assert_eq!(seen(), (1, None));
        // A mode that was first set after the snapshot is restored to its default.
        mode! {
            static LATE: Cell<bool> = false;
        }
        LATE.within(true, || {
            NUMBER.within(9, || outside.within(|| assert_eq!((LATE.get(), seen()), (false, (1, None)))))
        });
    }
}
