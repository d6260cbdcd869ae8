//! [`Value`]: a type that collectives can move.

use dtensor_array::{Array, Meta};

use crate::{Arrays, Collective, Error, Group, Result, Site};

/// Turns the results of collectives that run as one into values. It gets no arrays if the values have no data.
pub type Finish<V> = Box<dyn FnOnce(Arrays) -> Result<Vec<V>> + Send>;

/// A type that collectives can move: an [`Array`], or a type of another crate that holds one, for example a tensor that records
/// gradients.
pub trait Value: Clone + Send + 'static {
    /// Returns shape, dtype and device.
    fn meta(&self) -> Meta;

    /// Returns the array to move, or `None` if the value has no data. Returns an error, which names `op`, if the value cannot be
    /// moved.
    fn array(&self, op: &'static str) -> Result<Option<Array>>;

    /// Wraps an array that a collective returned.
    fn from_array(array: Array) -> Self;

    /// Returns an error if the value requires a gradient. Called by the collectives that do not pass gradients on, so that no
    /// gradient is lost silently.
    fn check_constant(&self, op: &'static str) -> Result<()> {
        let _ = op;
        Ok(())
    }

    /// Returns true if this value requires a gradient.
    fn requires_grad(&self) -> bool {
        false
    }

    /// Returns the function that makes values of the results of collectives that run as one, each on one of `values`. Called when
    /// they begin.
    #[track_caller]
    fn finish(values: &[&Self], group: &Group, collectives: &[Collective], at: &Site) -> Finish<Self>;
}

impl Value for Array {
    fn meta(&self) -> Meta {
        Array::meta(self)
    }

    fn array(&self, _: &'static str) -> Result<Option<Array>> {
        Ok(Some(self.clone()))
    }

    fn from_array(array: Array) -> Self {
        array
    }

    fn finish(values: &[&Self], _: &Group, collectives: &[Collective], _: &Site) -> Finish<Self> {
        let (n, op) = (values.len(), collectives.first().map_or("coalesced", Collective::name));
        Box::new(move |arrays| {
            if arrays.len() != n {
                return Err(Error::argument(op, "the collective returned no value on this rank"));
            }
            Ok(arrays.into_vec())
        })
    }
}
